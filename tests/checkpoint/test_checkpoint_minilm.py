"""Real weights: all-MiniLM-L6-v2, quantized, and what that does to its embeddings."""

from __future__ import annotations

from pathlib import Path

import minilm
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import checkpoint

pytestmark = pytest.mark.skipif(bool(minilm.missing()), reason=minilm.missing())

# Lowest and mean cosine of the sentences, a little below what is measured (benchmarks/results/).
# That of mxfp8 is the most that 4 significant bits can give: see test_mxfp8_is_as_good_as_its_bits.
COSINE = {
    "mxfp8": (0.994, 0.9978), "fp8_1x128": (0.995, 0.998), "fp8_128x128": (0.995, 0.9978),
    "mxfp6_e2m3": (0.988, 0.9965), "mxfp8_e5m2": (0.975, 0.992), "mxfp6_e3m2": (0.975, 0.992),
    "nvfp4": (0.89, 0.968), "mxfp4": (0.83, 0.94),
}  # fmt: skip


@pytest.fixture(scope="module")
def before() -> Tensor:
    return minilm.embed(minilm.weights(minilm.directory() / "model.safetensors"))


def test_the_encoder_is_the_model(before: Tensor):
    # the embedding that the model's card leads to for its first example, as sentence-transformers
    # prints it; and sentences that mean the same are closer than any that do not
    assert before[0, :3].tolist() == pytest.approx([0.0676569, 0.0634959, 0.0487131], abs=2e-6)
    similarity = before @ before.T
    alike = [similarity[a, b].item() for a, b in minilm.ALIKE]
    for a, b in minilm.ALIKE:
        similarity[a, b] = similarity[b, a] = -1
    similarity.fill_diagonal_(-1)
    for (a, _), value in zip(minilm.ALIKE, alike, strict=True):
        assert value > similarity[a].max().item() + 0.1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", minilm.FORMATS)
def test_embeddings_survive(format: str, before: Tensor, tmp_path: Path):
    result = minilm.measure(format, before, tmp_path)
    assert result["quantized_tensors"] == 37  # 6 layers of 6, and the pooler
    assert result["cosine_min"] >= COSINE[format][0]
    assert result["cosine_mean"] >= COSINE[format][1]
    assert len(result["sqnr_db"]) == 7
    # SQNR of a format does not depend much on the layer; a lost scale would show here
    assert max(result["sqnr_db"].values()) - min(result["sqnr_db"].values()) < 1.0


def test_mxfp8_is_as_good_as_its_bits(before: Tensor, tmp_path: Path):
    """Nothing is lost to scales, saturation or the range of E4M3: only to its 3 mantissa bits."""
    source, target = minilm.directory() / "model.safetensors", tmp_path / "out"
    checkpoint.quantize_file(source, target, "mxfp8")
    loaded, best = checkpoint.load_file(target), minilm.weights(source)
    for name, t in loaded.items():
        if isinstance(t, bs.ScaledTensor):
            best[name] = minilm.significant(best[name], 4)
    ours = minilm.cosines(before, minilm.embed(minilm.weights(target)))
    bound = minilm.cosines(before, minilm.embed(best))
    assert ours == pytest.approx(bound, abs=1e-4)


def test_real_bytes(tmp_path: Path):
    source, target = minilm.directory() / "model.safetensors", tmp_path / "out"
    checkpoint.quantize_file(source, target, "nvfp4")
    original, loaded = checkpoint.load_file(source), checkpoint.load_file(target)
    name = "encoder.layer.3.output.dense.weight"
    assert torch.equal(loaded[name], bs.quantize(original[name], "nvfp4"))
    for kept in (
        "embeddings.word_embeddings.weight",
        "embeddings.position_ids",
        "pooler.dense.bias",
    ):
        assert torch.equal(loaded[kept], original[kept])
    report = checkpoint.inspect_file(target)
    assert (report.manifest, len([t for t in report.tensors if t.quantized])) == ("intact", 37)
