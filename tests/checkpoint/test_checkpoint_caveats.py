"""What transformers gets wrong of folders that others read right, and is told when they are made.

Each case is looked at with transformers itself: where one fails, it reads them now, and the warning
can go.
"""

from pathlib import Path

import pytest
import torch

from blockscale import checkpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")

DENSE = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 2, "num_experts_per_tok": 1}  # two blocks


def made(tmp_path: Path, config: object) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def is_read_right(folder: Path, tmp_path: Path) -> bool:
    """Whether transformers has the weights of ``load_folder``, by way of its values in bf16."""
    checkpoint.convert_folder(folder, tmp_path / "bf16", to="bf16")
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = load(tmp_path / "bf16", dtype=torch.bfloat16)
    try:
        found = load(folder, dtype=torch.bfloat16)
    except RuntimeError:
        return False
    x = torch.arange(64)[None]
    for model in (expected, found):
        for module in model.modules():  # activations as they are
            if scheme := getattr(module, "quantization_scheme", None):
                scheme.input_activations = None
    with torch.no_grad():
        a, b = (model(x).logits.float() for model in (expected, found))
    return bool((a - b).norm() < 0.01 * a.norm())


@pytest.mark.parametrize(
    ("format", "convention", "right"),
    [
        ("nvfp4", "compressed-tensors", False),
        ("mxfp8", "compressed-tensors", False),
        ("fp8_128x128", "compressed-tensors", False),
        ("mxfp4", "compressed-tensors", True),
        ("mxfp8", "fine-grained", True),
        ("fp8_128x128", "deepseek", True),
    ],
)
def test_experts(tmp_path: Path, format: str, convention: str, right: bool):
    source = made(tmp_path, transformers.Qwen3MoeConfig(**DENSE, **EXPERTS))
    manifest = checkpoint.quantize_folder(source, tmp_path / "out", format, convention)
    told = [each for each in manifest["warnings"] if f"experts in {format}" in each]
    assert bool(told) is not right
    assert is_read_right(tmp_path / "out", tmp_path) is right


@pytest.mark.parametrize("rows", [192, 320, 256])  # 2 blocks of 96 there; 3 of 106.7, an error
@pytest.mark.parametrize("convention", ["deepseek", "compressed-tensors"])
def test_rows(tmp_path: Path, convention: str, rows: int):
    config = transformers.LlamaConfig(**{**DENSE, "intermediate_size": rows})
    source = made(tmp_path, config)
    manifest = checkpoint.quantize_folder(source, tmp_path / "out", "fp8_128x128", convention)
    right = convention == "compressed-tensors" or rows % 128 == 0
    assert (
        any(f"{rows} rows, ...) have no multiple of 128 rows" in w for w in manifest["warnings"])
        is not right
    )
    assert is_read_right(tmp_path / "out", tmp_path) is right


def test_converted(tmp_path: Path):
    config = transformers.LlamaConfig(**{**DENSE, "intermediate_size": 192})
    checkpoint.quantize_folder(made(tmp_path, config), tmp_path / "ours", "fp8_128x128")
    manifest = checkpoint.convert_folder(tmp_path / "ours", tmp_path / "out", to="deepseek")
    assert "have no multiple of 128 rows" in manifest["warnings"][0]
