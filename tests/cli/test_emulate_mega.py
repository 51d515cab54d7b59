"""``blockscale emulate megamoe``."""

import json
import sys
from unittest.mock import patch

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from blockscale.cli import main

SMALL = ["--hidden", "128", "--intermediate", "128", "--experts", "4"]


def run(*args: str) -> int:
    with (
        patch.object(sys, "argv", ["blockscale", "emulate", "megamoe", *args]),
        pytest.raises(SystemExit) as exit,
    ):
        main()
    return exit.value.code


def test_ranks_have_the_bits_of_steps(capsys):
    assert run("--format", "mxfp4", "--tokens", "5", *SMALL, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert found["error"] < 0.1
    assert found["report"]["instructions"]["red.release.sys.global.add.u32"] > 0


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_sizes_that_are_no_tiles_on_hopper(format, capsys):
    sizes = "--tokens", "37", "--hidden", "128", "--intermediate", "384", "--experts", "6"
    assert run("--arch", "sm_90a", "--format", format, *sizes, "--ranks", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["equal"]


@pytest.mark.parametrize(("args", "said"), [
    (["--arch", "sm_100"], "arch: got 'sm_100'"),
    (["--format", "fp6"], "format: got 'fp6'"),
    (["--experts", "7"], "experts: got 7; expected a multiple of 2 ranks"),
    (["--topk", "9"], "topk: got 9; all ranks together have 8 experts"),
    (["--ranks", "0"], "ranks: got 0; expected 1 or more"),
    (["--intermediate", "64"], "intermediate size 64: tiles and their scales want a multiple"),
    (["--arch", "sm_90a", "--intermediate", "96"], "intermediate size 96: tiles and"),
    (["--hidden", "100"], "hidden size 100: tiles and"),
    (["--ctas", "3"], "ctas: got 3; expected 1 or 2"),
])  # fmt: skip
def test_bad_input(args, said, capsys):
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
