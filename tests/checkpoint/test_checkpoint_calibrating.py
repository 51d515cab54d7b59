"""Models that ``quantize --calibrate`` runs: their dtype and length, and what cannot be run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_file import Ran
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

import blockscale as bs
from blockscale import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
Cli = Callable[..., Ran]


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows 64 positions and no more, in fp32, with a text of more tokens."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("calibrating") / "opt"
    config = OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=64, word_embed_proj_dim=64,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(63)} | {"[UNK]": 63}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    (folder.parent / "text").write_text(" ".join(f"w{i * i % 63}" for i in range(200)))
    return folder


def _changed(source: Path, target: Path, **config: object) -> Path:
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, **config}))
    return target


def test_positions_and_dtype(opt: Path, tmp_path: Path, blockscale: Cli):
    """No more positions at a time than there are; weights are those of files, whatever dtype the
    configuration names."""
    source = _changed(opt, tmp_path / "in", dtype="bfloat16")
    given = source, tmp_path / "out", "--format=nvfp4", "--convention=modelopt", "--gptq"
    ran = blockscale("quantize", *given, "--calibrate", opt.parent / "text")
    assert ran.code == 0, ran.err
    state = checkpoint.load_folder(tmp_path / "out")
    made = [q for q in state.values() if isinstance(q, bs.ScaledTensor)]
    assert len(made) == 6
    scales = [x for n, x in state.items() if n.endswith("input_scale")]
    assert len(scales) == 6


def test_said_before_a_model_runs(opt: Path, tmp_path: Path, blockscale: Cli):
    text, out = opt.parent / "text", tmp_path / "out"
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    unknown = _changed(opt, tmp_path / "unknown", model_type="unheard")
    damaged = _changed(opt, tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "?"}}')
    quantized = tmp_path / "quantized"
    assert blockscale("quantize", opt, quantized, "--format=nvfp4").code == 0
    for source, file, options, message in (
        (opt, text, ["--format=mxfp8"], "calibrate: mxfp8 has no scale of activations"),
        (
            opt,
            tmp_path / "binary",
            [],
            "no text in UTF-8 (invalid start byte); name a file of plain",
        ),
        (unknown, text, [], "calibrate: transformers cannot load the model of"),
        (damaged, text, [], "calibrate: transformers cannot load the tokenizer of"),
        (quantized, text, [], "is quantized already, as its config.json says"),
        (opt, text, ["--gptq", "--include=*embed_tokens*"], "gptq: none of the 1 tensors"),
    ):
        ran = blockscale("quantize", source, out, "--format=nvfp4", "--calibrate", file, *options)
        assert ran.code == 2, (message, ran.err)
        assert message in ran.err, ran.err
        assert "Traceback" not in ran.err
        assert not out.exists()
