"""inspect: what it says of files that are whole, stale, foreign or not quantized; its pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_file import QUANTIZED, Ran, tensors

import blockscale as bs
from blockscale import checkpoint

Cli = Callable[..., Ran]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    target = tmp_path / "out.safetensors"
    checkpoint.quantize_file(source, target, "nvfp4")
    return target


def test_report(made: Path):
    report = checkpoint.inspect_file(made)
    assert (report.manifest, report.measured, report.stale) == ("intact", "manifest", ())
    quantized = {t.name: t for t in report.tensors if t.quantized}
    assert set(quantized) == set(QUANTIZED)
    assert {t.name for t in report.tensors} == set(tensors())
    for name, t in quantized.items():
        x = tensors()[name]
        q = bs.quantize(x, "nvfp4")
        assert (t.format, t.shape) == ("nvfp4", tuple(x.shape))
        assert t.nbytes == q.qdata.numel() + q.scale.numel() + 4 + 4  # and input_scale
        assert t.bf16_bytes == 2 * x.numel()
        assert t.error is not None
        error = (q.dequantize(torch.float32) - x.float()).double()
        sqnr = 10 * torch.log10(x.double().square().sum() / error.square().sum())
        assert t.error.sqnr_db == pytest.approx(sqnr.item(), abs=1e-3)
    assert report.errors_by_format()["nvfp4"].elements == sum(
        t.numel() for n, t in tensors().items() if n in QUANTIZED
    )


def test_measuring_again_gives_the_same(made: Path, source: Path):
    recorded = {t.name: t.error for t in checkpoint.inspect_file(made).tensors if t.error}
    made.with_name(made.name + ".manifest.json").unlink()
    report = checkpoint.inspect_file(made)
    assert report.manifest == "missing"
    assert not any(t.error for t in report.tensors)
    report = checkpoint.inspect_file(made, source)
    assert (report.manifest, report.measured) == ("missing", "source")
    for t in report.tensors:
        if t.quantized:
            assert t.error is not None
            assert t.error.to_json() == recorded[t.name].to_json()


def test_measuring_what_save_file_wrote(tmp_path: Path):
    x = torch.randn(100, 90)
    state = {
        "padded": bs.quantize(x, "fp8_128x128", pad=True),
        "column": bs.quantize(x, "mxfp8", -2, pad=True),
    }
    checkpoint.save_file(state, tmp_path / "q")
    checkpoint.save_file({"padded": x, "column": x}, tmp_path / "x")
    report = {t.name: t for t in checkpoint.inspect_file(tmp_path / "q", tmp_path / "x").tensors}
    assert report["padded"].error is not None
    assert report["padded"].error.elements == 9000
    assert report["column"].error is None
    assert "not measured" in report["column"].note


def test_stale(made: Path, source: Path, blockscale: Cli):
    content = bytearray(made.read_bytes())
    with checkpoint.reader.Reader(made) as file:
        at = file.header.tensors["layers.0.mlp.weight_scale"].offset
    content[at] ^= 1
    made.write_bytes(content)
    report = checkpoint.inspect_file(made)
    assert (report.manifest, report.stale) == ("stale", ("layers.0.mlp.weight_scale",))
    errors = {t.name: t.error is None for t in report.tensors if t.quantized}
    assert errors == {n: "mlp" in n for n in QUANTIZED}
    ran = blockscale("inspect", made)
    assert ran.code == 1
    assert "stale, it does not describe these bytes: 'layers.0.mlp.weight_scale'" in ran.out
    # another header: nothing is what it was
    checkpoint.save_file({"w": bs.quantize(torch.ones(2, 32), "mxfp8")}, made)
    report = checkpoint.inspect_file(made)
    assert (report.manifest, len(report.stale)) == ("stale", 2)
    ran = blockscale("inspect", made, "--plot", made.with_name("p.png"))
    assert ran.code == 2
    assert "give source" in ran.err


def test_the_exit_code(made: Path, source: Path, blockscale: Cli):
    """1 where the manifest is stale, whatever is asked for; 0 without one, or without a need."""
    asked = ((), ("--json",), ("--source", source))
    assert [blockscale("inspect", made, *more).code for more in asked] == [0, 0, 0]
    content = bytearray(made.read_bytes())
    content[-1] ^= 1
    made.write_bytes(content)
    for more in asked:
        ran = blockscale("inspect", made, *more)
        assert (ran.code, ran.err) == (1, "")
        assert "stale" in ran.out
    assert json.loads(blockscale("inspect", made, "--json").out)["manifest"] == "stale"
    made.with_name(made.name + ".manifest.json").unlink()
    assert [blockscale("inspect", made, *more).code for more in asked] == [0, 0, 0]
    assert blockscale("inspect", source).code == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{}", b"[]", b"not json", b'{"manifest": 2, "tensors": []}', b"[" * 100_000,
        b'{"manifest": 2, "tensors": {"a": 3}}', b'{"manifest": 99, "tensors": {}}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_none(damage: bytes, made: Path):
    made.with_name(made.name + ".manifest.json").write_bytes(damage)
    assert checkpoint.inspect_file(made).manifest == "missing"


@pytest.mark.parametrize(
    "change",
    [
        {"error": {}}, {"error": 3}, {"error": {"signal": -1.0}}, {"error": {"noise": "x"}},
        {"error": {"elements": 1e400}}, {"error": {"scales": {"counts": {"999999999": 1}}}},
        {"checksums": 3}, {"checksums": {}},
    ],
)  # fmt: skip
def test_a_damaged_record_is_not_believed(change: dict, made: Path):
    path = made.with_name(made.name + ".manifest.json")
    manifest = json.loads(path.read_text())
    record = manifest["tensors"]["layers.0.mlp.weight"]
    if isinstance(change.get("error"), dict) and change["error"]:
        change = {"error": {**record["error"], **change["error"]}}
    record.update(change)
    path.write_text(json.dumps(manifest).replace("Infinity", "1e400"))
    report = {t.name: t for t in checkpoint.inspect_file(made).tensors}
    assert report["layers.0.mlp.weight"].error is None
    assert report["layers.0.attn.weight"].error is not None


def test_the_table(made: Path, source: Path, blockscale: Cli):
    ran = blockscale("inspect", made)
    assert (ran.code, ran.err) == (0, "")
    assert re.search(
        r"layers\.0\.attn\.weight +nvfp4 +260x256 +37\.4 kB +3\.55x +20\.\d\d ", ran.out
    )
    assert re.search(r"3 quantized, [\d.]+ kB: 3\.55x compression against bf16", ran.out)
    assert "manifest: all checksums match" in ran.out
    ran = blockscale("inspect", made, "--source", source)
    assert "measured against the source just now" in ran.out
    ran = blockscale("inspect", source)
    assert re.search(
        r"layers\.0\.mlp\.weight +F16 +64x384 +49\.2 kB +1\.00x +[\d.]+ +-\d+ to 2", ran.out
    )
    assert re.search(r"position_ids +I64 +4x128", ran.out)
    assert "nothing in it is quantized" in ran.out


def test_json(made: Path, source: Path, blockscale: Cli):
    out = json.loads(blockscale("inspect", made, "--json").out)
    assert out["manifest"] == "intact"
    assert out["totals"]["quantized"] == 3
    assert out["totals"]["bytes"] == made.stat().st_size
    by_name = {t["name"]: t for t in out["tensors"]}
    assert by_name["layers.0.attn.weight"]["error"]["sqnr_db"] > 20
    assert by_name["norm.weight"]["note"].startswith("left alone by default")
    out = json.loads(blockscale("inspect", source, "--json").out)
    by_name = {t["name"]: t for t in out["tensors"]}
    assert by_name["norm.weight"]["values"]["amax"] == tensors()["norm.weight"].abs().max().item()


def test_pictures(made: Path, source: Path, tmp_path: Path, blockscale: Cli):
    mixed = tmp_path / "mixed"
    x = torch.randn(64, 128)
    checkpoint.save_file({f: bs.quantize(x, f) for f in bs.formats}, mixed)
    checkpoint.save_file(dict.fromkeys(bs.formats, x), tmp_path / "x")
    for i, arguments in enumerate(([made], [source], [mixed, "--source", tmp_path / "x"])):
        ran = blockscale("inspect", *arguments, "--plot", tmp_path / f"{i}.png")
        assert ran.code == 0, ran.err
        assert (tmp_path / f"{i}.png").read_bytes().startswith(PNG)


def test_figures_are_values(made: Path, source: Path):
    from blockscale.checkpoint import plots

    left, right = plots.errors(checkpoint.inspect_file(made)).axes
    assert left.get_title() == "Relative error of elements"
    assert right.get_title() == "Block scales times global scale"
    (axes,) = plots.values(checkpoint.inspect_file(source)).axes
    assert len(axes.patches) == 3  # F32, BF16, F16
    with pytest.raises(ValueError, match=r"nothing|no floating-point"):
        plots.values(checkpoint.inspect_file(made))


def test_a_label_lies_above_the_line_of_the_worst_tensor(tmp_path: Path):
    from blockscale.checkpoint import plots

    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    worst = torch.where(x.abs() > 1, x.sign() * 5.1, x * 0.3)  # between two codes, or flushed
    checkpoint.save_file({"a.weight": x, "b.weight": worst}, tmp_path / "in")
    checkpoint.quantize_file(tmp_path / "in", tmp_path / "out", "mxfp4")
    left, _ = plots.errors(checkpoint.inspect_file(tmp_path / "out")).axes
    (label,) = (text for text in left.texts if "flushed\n" in text.get_text())
    bins = [patch.get_data() for patch in left.patches]
    assert len(bins) == 2
    for values, edges, _ in bins:
        assert label.xy[1] >= values[max(i for i, edge in enumerate(edges) if edge <= 1.2)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["{made}", "--plot", "x.pdf"], "plot: x.pdf does not end in .png"),
        (["{made}", "--plot", "no/such/x.png"], "plot: the directory no/such does not exist"),
        (["{made}", "--source", "missing"], "source: missing does not exist"),
        (
            ["{made}", "--source", "{other}"],
            "source: {other} has no 'layers.0.attn.weight' of shape",
        ),
        (["{made}", "--source", "{wide}"], "source: 'layers.0.experts.weight' is F64"),
        (["{source}", "--source", "{source}"], "source: {source} has no quantized tensors"),
        (["{integers}", "--plot", "x.png"], "no floating-point values"),
        (["missing"], "path: missing does not exist"),
        (["."], "path: . has 2 .safetensors files and no index"),
        ([], "path"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], why: str, made: Path, source: Path, tmp_path: Path, blockscale: Cli,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(2, 2)}, "other")
    save_file({n: t.double() for n, t in tensors().items() if "experts" in n} | {
        n: t for n, t in tensors().items() if "experts" not in n
    }, "wide")  # fmt: skip
    save_file({"i": torch.arange(3)}, "integers")
    before = set(tmp_path.rglob("*"))
    names = {
        "made": made.name,
        "source": source.name,
        "other": "other",
        "wide": "wide",
        "integers": "integers",
    }
    ran = blockscale("inspect", *(a.format(**names) for a in arguments))
    assert ran.code == 2
    assert why.format(**names) in " ".join(ran.err.split())
    assert ran.err.count("\n") == 1
    assert set(tmp_path.rglob("*")) == before


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, blockscale: Cli):
    nasty = "a\x1b[31m[bold red]\n\x07" + "x" * 300
    formula = "$\\frac{漢$"
    state = {name: torch.full((2, 32), 0.3) for name in (nasty, "[/]", formula)}
    save_file(state, tmp_path / "in")
    ran = blockscale("quantize", tmp_path / "in", tmp_path / "out", "--format", "mxfp8")
    assert ran.code == 0
    for path in ("in", "out"):
        ran = blockscale("inspect", tmp_path / path, "--plot", tmp_path / "$_$.png")
        assert (ran.code, ran.err) == (0, "")
        assert "\x1b" not in ran.out
        assert "\x07" not in ran.out
        assert "[/]" in ran.out
