"""What the model says of a mega MoE, and how many bytes travel: docs/lab/mega-moe.md; the times
that ``gpu_mega.py`` found there, and perplexities of ``moe_perplexity.py``. Needs no GPU.

    PYTHONPATH=../src:. python3 mega_tables.py

Each rank has as many tokens, each of which names experts at random.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from exact_tables import LAB, RESULTS, table
from gpu_quantize import rewrite

from blockscale.kernels.mega.buffers import Sizes
from blockscale.model import MACHINES, estimate, launch

MARKS = "<!-- {}: made by benchmarks/mega_tables.py -->", "<!-- {}: end -->"
#: Architecture, the name of what is multiplied, the format of activations, and bytes a second that
#: a rank sends. SMs of an H200 that push reach 302 GB/s of 450 (measured); a B200's link has twice
#: as many, of which as large a share is taken.
CASES = (
    ("sm_90a", "fp8_block", "fp8_1x128", 302e9),
    ("sm_100a", "mxfp8_mxfp4", "mxfp8", 604e9),
    ("sm_100a", "nvfp4", "nvfp4", 604e9),
)
RANKS, TOPK, HIDDEN, INTERMEDIATE, EXPERTS = 8, 6, 4096, 2048, 32
TOKENS = (64, 512, 2048, 8192)


@dataclass(frozen=True)
class Load:
    """Of a rank. Bytes that it sends, of tokens and of results; and of bf16 tokens in their place,
    once to each rank, and once for each expert."""

    tokens: float
    results: float
    bf16: float
    for_each: float

    @classmethod
    def of(cls, sizes: Sizes) -> Load:
        ranks, count, columns = sizes.ranks, sizes.tokens, sizes.hidden
        others = (ranks - 1) * (1 - (1 - 1 / ranks) ** sizes.topk)  # that a token travels to
        away = sizes.topk * (1 - 1 / ranks)  # experts that are there
        row = sizes.row_bytes(columns) + 4 * sizes.scale_words(columns)
        plain = 2 * columns
        once, for_each = count * others, count * away
        return cls(once * row, for_each * plain, once * plain, for_each * plain)


def products(arch: str, format: str, sizes: Sizes) -> float:
    """Microseconds of both, each a launch of its own: experts have the same numbers of rows."""
    rows = sizes.pairs
    each = tuple(rows // sizes.experts + (i < rows % sizes.experts) for i in range(sizes.experts))
    shapes = (
        (rows, 2 * sizes.intermediate, sizes.hidden),
        (rows, sizes.hidden, sizes.intermediate),
    )
    made = (launch(arch, format, shape, groups=each) for shape in shapes)
    return sum(estimate(one, MACHINES[arch]).microseconds for one in made)


def sizes_of(tokens: int, activations: str) -> Sizes:
    return Sizes(RANKS, tokens, TOPK, HIDDEN, INTERMEDIATE, EXPERTS, activations)


def estimates() -> str:
    lines = []
    for arch, format, activations, rate in CASES:
        for tokens in TOKENS:
            sizes = sizes_of(tokens, activations)
            multiplied, load = products(arch, format, sizes), Load.of(sizes)
            sent = 1e6 * (load.tokens + load.results) / rate
            flops = 6 * sizes.pairs * HIDDEN * INTERMEDIATE
            hidden, apart = max(multiplied, sent), multiplied + sent
            cells = (f"{multiplied:,.0f}", f"{sent:,.0f}", f"{apart / hidden:.2f}")
            rates = (f"{flops / (us * 1e6):,.0f}" for us in (hidden, apart))
            lines.append([f"{MACHINES[arch].name}, {format}", f"{tokens:,}", *cells, *rates])
    heads = "tokens", "products, us", "links, us", "apart / hidden", "TFLOP/s hidden", "apart"
    return table(["a rank of 8", *heads], lines)


def travels() -> str:
    lines = []
    for _, format, activations, _ in CASES:
        load = Load.of(sizes_of(1, activations))
        lines.append(
            [
                f"{format}",
                f"{load.tokens:,.0f}",
                f"{load.tokens / load.bf16:.3f}",
                f"{load.tokens / load.for_each:.3f}",
                f"{load.results:,.0f}",
            ]
        )
    heads = "bytes sent of a token", "of bf16's, once to a rank", "once for each expert", "results"
    return table(["", *heads], lines)


def perplexities() -> str:
    rows = json.loads((RESULTS / "moe_perplexity_cpu.json").read_text())["rows"]
    plain, lines = rows[0]["perplexity"], []
    for row in rows:
        formats = row["weights"], row["activations"], row.get("scales", "")
        change = f"{100 * (row['perplexity'] / plain - 1):+.2f} %"
        lines.append([*formats, f"{row['perplexity']:.4f}", change])
    heads = "activations", "their global scales", "perplexity", "beside bf16"
    return table(["weights", *heads], lines)


def measured(file: str, share: bool = True) -> str:
    """Kernel and steps, as ``gpu_mega.py`` found them."""
    lines = []
    for row in json.loads((RESULTS / file).read_text())["rows"]:
        lines.append(
            [
                f"{row['weights']}",
                f"{row['experts']}",
                f"{row['tokens']:,}",
                f"{row['kernel']:,.0f}",
                f"{row['steps']:,.0f}",
                f"{row['steps'] / row['kernel']:.2f}",
                f"{row['tflops']:,.0f}",
                *([f"{row['weights_share']:.2f}"] if share else []),
            ]
        )
    heads = "experts a rank", "tokens", "kernel, us", "steps, us", "ratio", "TFLOP/s"
    return table(["weights", *heads, *(["reading weights"] if share else [])], lines)


def main() -> None:
    made = {"estimates": estimates(), "travels": travels(), "perplexity": perplexities()}
    made["one"] = measured("mega_moe_h200.json")
    made["more"] = measured("mega_moe_256_h200.json")
    # what is in that file takes all experts for used
    made["two"] = measured("mega_moe_two_h200.json", share=False)
    for name, text in made.items():
        rewrite(LAB / "mega-moe.md", text, *(mark.format(name) for mark in MARKS))


if __name__ == "__main__":
    main()
