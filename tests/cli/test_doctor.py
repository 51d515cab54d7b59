"""What doctor says of machines that are not here: its advice is a function of facts."""

import json
import subprocess
import sys

import pytest
import typer
from rich.markup import render
from typer.testing import CliRunner

import blockscale
from blockscale.cli import main
from blockscale.cli.doctor import Facts, advice, gather


def facts(**changes) -> Facts:
    base = {
        "python": "3.11",
        "platform": "Linux x86_64",
        "packages": {"torch": "2.13.0", "numba": "0.68", "nvidia-cutlass-dsl": "4.8.1"},
        "cuda": "13.0",
        "gpu": None,
        "capability": None,
        "dsl_arch": None,
    }
    return Facts(**{**base, **changes})


def test_no_gpu():
    assert advice(facts(cuda=None)) == [
        "No GPU (this torch is a CPU build): everything runs on the CPU, with the same bytes."
    ]


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")]
)
def test_known_architectures_carry_their_suffix(capability, arch):
    known = facts(gpu="GPU", capability=capability)
    assert known.architecture == arch
    assert arch in advice(known)[0]


def test_the_story_of_sm_100_is_told_where_it_applies():
    hopper = " ".join(advice(facts(gpu="H200", capability=(9, 0))))
    assert "scale_vec" not in hopper
    blackwell = " ".join(advice(facts(gpu="B200", capability=(10, 0))))
    assert "sm_100f" in blackwell
    assert "sm_100a" in blackwell
    wrong = " ".join(advice(facts(dsl_arch="sm_103")))
    assert "sm_103 is not enough" in wrong
    assert "CUTE_DSL_ARCH=sm_103a" in wrong


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_what_only_the_emulator_has_run(capability):
    said = "No GPU of this kind has run these kernels"
    packages = dict.fromkeys(("numba", "nvidia-cutlass-dsl", "apache-tvm-ffi"), "1.0")
    blackwell = advice(facts(gpu="B200", capability=capability, packages=packages))
    assert any(line.startswith(said) for line in blackwell)
    assert not any("plain torch" in line for line in blackwell)
    assert said not in " ".join(advice(facts(gpu="H200", capability=(9, 0), packages=packages)))


def test_an_unknown_chip_and_missing_packages():
    text = " ".join(advice(facts(gpu="L4", capability=(8, 9))))
    assert "sm_89" in text
    assert "plain torch" in text
    bare = {"torch": "2.13.0", "numba": None, "nvidia-cutlass-dsl": None}
    text = " ".join(advice(facts(gpu="H200", capability=(9, 0), packages=bare)))
    assert "numba is missing" in text
    assert "pip install 'blockscale[cuda]'" in text


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs ``blockscale`` in this process: its exit code, and what it wrote."""

    def with_arguments(*arguments):
        monkeypatch.setattr(sys, "argv", ["blockscale", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return with_arguments


def test_this_machine_as_json(run):
    code, output, errors = run("doctor", "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert found["python"] == gather().python
    assert found["packages"]["blockscale"] == blockscale.__version__
    fused = {"swiglu_quantize", "swiglu_backward_quantize", "rmsnorm_quantize"}
    assert {row["operation"] for row in found["backends"]} >= {"quantize", "gemm", *fused}
    assert all(row["why"] for row in found["backends"])


@pytest.mark.parametrize("arguments", [["nosuch"], ["doctor", "--nosuch"]])
def test_bad_usage_is_one_line_and_exit_code_2(run, arguments):
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert len(errors.strip().splitlines()) == 1
    assert "nosuch" in errors


def test_brackets_are_printed(capsys, monkeypatch):
    """rich takes them for markup: pip install 'blockscale' would bring no kernels."""
    from blockscale import ops
    from blockscale.cli.doctor import doctor

    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(ops, "backend", lambda *_: ("reference", "pip install 'blockscale[cuda]'"))
    doctor(json=False)
    assert "pip install 'blockscale[cuda]'" in capsys.readouterr().out


def test_version():
    import blockscale

    run = subprocess.run(
        [sys.executable, "-m", "blockscale", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"blockscale {blockscale.__version__}\n"


def commands(command, path=()):
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, (*path, name))


def test_brackets_of_help_are_printed():
    """Of every command: rich takes those that nobody escaped for markup."""
    from blockscale.cli import app

    bracketed = {}
    for path, command in commands(typer.main.get_command(app)):
        helps = [command.help, *(getattr(one, "help", None) for one in command.params)]
        for text in filter(None, helps):
            shown = render(text)
            assert not shown.spans, path
            words = [word for word in shown.plain.split() if "[" in word]
            if words:
                bracketed.setdefault(path, []).extend(words)
    assert bracketed
    for path, words in bracketed.items():
        run = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
        assert all(word in run.stdout for word in words), path
