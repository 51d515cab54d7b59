"""quantize_file: its bytes, its choice of tensors, and what the command says of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as their_load
from safetensors.torch import save_file
from small_file import QUANTIZED, Ran, tensors
from xxhash import xxh3_128

import blockscale as bs
from blockscale import checkpoint
from blockscale.checkpoint import tasks
from blockscale.checkpoint.tasks import chunks

Cli = Callable[..., Ran]


def left_over(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"in.safetensors"}


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    ("format", "chunk"),
    [
        *((f, chunk) for f in bs.formats for chunk in (1 << 20, 5000)),
        ("mxfp8", 1),
        ("fp8_128x128", 1),
    ],
)
def test_bytes_are_those_of_quantize(
    format: str, chunk: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks, "CHUNK", chunk)
    target = tmp_path / "out.safetensors"
    manifest = checkpoint.quantize_file(source, target, format)
    assert left_over(tmp_path) == {target.name, target.name + ".manifest.json"}
    assert json.loads((tmp_path / "out.safetensors.manifest.json").read_text()) == manifest
    block, loaded = bs.formats[format].block_size, checkpoint.load_file(target)
    for name, x in tensors().items():
        if name in QUANTIZED:
            assert x.shape[-1] % block == 0
            assert torch.equal(loaded[name], bs.quantize(x, format)), name
            assert loaded[name].dtype == x.dtype
        else:
            assert torch.equal(loaded[name], x), name
    theirs = their_load(target)  # and other tools read the file
    assert set(theirs) >= set(tensors())
    sums = {name: xxh3_128(_bytes(x)).hexdigest() for name, x in tensors().items()}
    assert {n: entry["source"][n] for n, entry in manifest["tensors"].items()} == sums
    for entry in manifest["tensors"].values():
        assert ("error" in entry) != ("copied" in entry)
    report = checkpoint.inspect_file(target)
    assert report.manifest == "intact"


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


@pytest.mark.parametrize("format", ["mxfp8", "fp8_128x128"])
@pytest.mark.parametrize(
    "shape",
    [(1, 128), (5, 7, 128), (300, 256), (3, 129, 384), (2, 2, 1, 512), (129, 4096), (1, 8192)],
)
@pytest.mark.parametrize("chunk", [1, 128 * 128, 50_000, 1 << 20])
def test_chunks_follow_each_other_and_cut_no_block(
    shape: tuple[int, ...], format: str, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks, "CHUNK", chunk)
    end, rows = 0, bs.formats[format].block[0]
    for start, piece in chunks(shape, bs.formats[format]):
        assert start == end
        end += math.prod(piece)
        assert piece[-1] == shape[-1]
        if rows > 1:  # within one matrix, a chunk starts at a block
            assert start // shape[-1] % shape[-2] % rows == 0
            assert piece[0] == 1 or piece[1] == shape[-2]
        assert math.prod(piece) <= max(chunk, rows * shape[-1])
    assert end == math.prod(shape)


def test_the_same_bytes_again(source: Path, tmp_path: Path):
    for name in ("a", "b"):
        checkpoint.quantize_file(source, tmp_path / name, "nvfp4")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_not_a_number_stays_in_its_block(tmp_path: Path, blockscale: Cli):
    x = torch.ones(64, 128)
    x[3, 40], x[9, 100] = float("nan"), float("inf")
    save_file({"w": x}, tmp_path / "in.safetensors")
    for format in ("mxfp8", "nvfp4"):
        ran = blockscale(
            "quantize", tmp_path / "in.safetensors", tmp_path / format, "--format", format
        )
        assert ran.code == 0
        assert "warning: 'w' has NaN or infinite values" in ran.out
        assert torch.equal(checkpoint.load_file(tmp_path / format)["w"], bs.quantize(x, format))


def test_a_file_can_have_several_formats(source: Path, tmp_path: Path):
    first, second = tmp_path / "one", tmp_path / "two"
    checkpoint.quantize_file(source, first, "nvfp4", include="*.mlp.*")
    manifest = checkpoint.quantize_file(first, second, "fp8_1x128")
    loaded = checkpoint.load_file(second)
    formats = {n: t.format.name for n, t in loaded.items() if isinstance(t, bs.ScaledTensor)}
    assert formats == {n: "nvfp4" if "mlp" in n else "fp8_1x128" for n in QUANTIZED}
    for name in QUANTIZED:
        assert torch.equal(loaded[name], bs.quantize(tensors()[name], formats[name]))
    assert manifest["tensors"]["layers.0.mlp.weight"]["copied"] == "quantized already"
    with pytest.raises(ValueError, match=r"include: .*quantized already"):
        checkpoint.quantize_file(first, tmp_path / "three", "mxfp8", include="*.mlp.weight")


# --- which tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        ((), (), QUANTIZED),
        ((), ("*attn*",), ("layers.0.experts.weight", "layers.0.mlp.weight")),
        (("layers.*",), (), QUANTIZED),
        (("layers.*",), ("*.experts.*", "*.mlp.*"), ("layers.0.attn.weight",)),
        (
            ("embed_tokens.weight", "*.mlp.weight"),
            (),
            ("embed_tokens.weight", "layers.0.mlp.weight"),
        ),
        (("*",), (), (*QUANTIZED, "embed_tokens.weight", "norm.weight")),
        ("*.mlp.weight", (), ("layers.0.mlp.weight",)),  # a string is one glob
    ],
)
def test_selection(include, exclude, chosen, source: Path, tmp_path: Path):
    manifest = checkpoint.quantize_file(source, tmp_path / "out", "mxfp8", include, exclude)
    assert {n for n, t in manifest["tensors"].items() if "error" in t} == set(chosen)
    why = {n: t["copied"] for n, t in manifest["tensors"].items() if "copied" in t}
    assert "multiple" in why["layers.0.odd.weight"]
    assert why["nothing"] == "empty"
    assert why["layers.0.attn.bias"] == "not a matrix"
    assert "I64" in why["position_ids"]


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "wte.weight", "transformer.wpe.weight", "lm_head.weight",
        "LM_HEAD.weight", "mlp.gate.weight", "router.weight", "x.weight_scale_inv",
        "x.weight_scale", "relative_attention_bias.weight", "q_norm.weight",
        "embeddings.position_embeddings.weight",
    ],
)  # fmt: skip
def test_left_alone_by_default(name: str, tmp_path: Path):
    save_file({name: torch.ones(4, 32), "up_gate_proj.weight": torch.ones(4, 32)}, tmp_path / "in")
    manifest = checkpoint.quantize_file(tmp_path / "in", tmp_path / "out")
    assert "by default" in manifest["tensors"][name]["copied"]
    manifest = checkpoint.quantize_file(tmp_path / "in", tmp_path / "two", include=[name])
    assert "error" in manifest["tensors"][name]


# --- the command line -----------------------------------------------------------------------------


def test_the_command_prints_a_summary(source: Path, tmp_path: Path, blockscale: Cli):
    ran = blockscale("quantize", source, tmp_path / "out", "--format", "mxfp8")
    assert (ran.code, ran.err) == (0, "")  # no progress where there is no terminal
    assert "3 tensors in mxfp8" in ran.out
    assert "7 copied" in ran.out
    assert (
        "copied: 1 matrix, last dimension 100 is not a multiple of mxfp8's block of 32" in ran.out
    )
    assert "SQNR 31." in ran.out


def test_the_command_prints_the_manifest(source: Path, tmp_path: Path, blockscale: Cli):
    ran = blockscale("quantize", source, tmp_path / "out", "--format", "nvfp4", "--json")
    assert json.loads(ran.out) == json.loads((tmp_path / "out.manifest.json").read_text())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_128x128"])
def test_statistics_do_not_depend_on_threads(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from blockscale.kernels.cpu import calls as cpu

    monkeypatch.setattr(cpu, "_CHUNK", 1 << 12)
    save_file({"w": torch.randn(700, 512)}, tmp_path / "in")
    found = []
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        try:
            manifest = checkpoint.quantize_file(tmp_path / "in", tmp_path / f"{threads}", format)
        finally:
            torch.set_num_threads(1)
        found.append(manifest["tensors"])
    assert found[0] == found[1] == found[2]


def test_progress(source: Path, tmp_path: Path):
    events: list[checkpoint.Progress] = []
    checkpoint.quantize_file(source, tmp_path / "out", "mxfp8", progress=events.append)
    done = [e.bytes for e in events]
    assert done == sorted(done)
    assert {e.total_bytes for e in events} == {done[-1]}
    assert events[-1].tensors == events[-1].total_tensors == 10
    assert not any(e.note for e in events)


def test_format_objects(source: Path, tmp_path: Path):
    import dataclasses

    checkpoint.quantize_file(source, tmp_path / "out", bs.formats["mxfp8"])
    other = dataclasses.replace(bs.formats["mxfp8"], block=(1, 64))
    with pytest.raises(ValueError, match="format: 'mxfp8' is not one of"):
        checkpoint.quantize_file(source, tmp_path / "two", other)
