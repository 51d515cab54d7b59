"""Tokens a second of the model of ``blockscale train`` on a CPU, by recipe, beside bf16.

``python benchmarks/cpu_train.py [--table]``. Every recipe makes a step in each round, one after the
other, so that whatever else the machine does hits all alike; ratios are medians of those of each
round. "(fp32)": the same as on a processor without AVX512_BF16. Writes
benchmarks/results/cpu_train.json and the table of docs/performance.md; ``--table`` only the latter.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from cpu_quantize import PAGE, ROOT, machine
from gpu_quantize import rewrite
from torch.nn.functional import cross_entropy

import blockscale as bs
from blockscale.kernels.cpu import bf16
from blockscale.training.gpt import GPT, VOCABULARY, in_block
from blockscale.training.recipes import RECIPES
from blockscale.training.settings import Settings

RESULT = ROOT / "benchmarks" / "results" / "cpu_train.json"
ROUNDS, FIRST = 60, 5
NAMES = ("bf16", "mxfp8", "mxfp8 (fp32)", "nvfp4", "nvfp4 (fp32)", "fp8_block")
MARK = "<!-- cpu_train: made by benchmarks/cpu_train.py -->", "<!-- cpu_train: end -->"


def stepper(name: str, settings: Settings) -> Callable[[], float]:
    """Makes a step of training under a recipe, and gives its seconds."""
    torch.manual_seed(0)
    model = GPT(settings.width, settings.layers, settings.heads, settings.context)
    tokens = torch.randint(VOCABULARY, (settings.batch, settings.context + 1))
    recipe = RECIPES[name.split()[0]]
    if recipe is not None:
        bs.convert(model, recipe, in_block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    available, as_fp32 = bf16.available, name.endswith("(fp32)")

    def step() -> float:
        bf16.available = (lambda: False) if as_fp32 else available
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def measure() -> dict[str, object]:
    settings = Settings()
    steps = {name: stepper(name, settings) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for i in range(FIRST + ROUNDS):
        turn = i % len(NAMES)
        for name in NAMES[turn:] + NAMES[:turn]:  # each comes first at times
            took = steps[name]()
            if i >= FIRST:
                times[name].append(took)
    tokens, base = settings.batch * settings.context, times["bf16"]
    rows = []
    for name, took in times.items():
        ratios = sorted(a / b for a, b in zip(base, took, strict=True))
        rows.append(
            {
                "recipe": name,
                "median_ms": round(1e3 * statistics.median(took), 1),
                "best_ms": round(1e3 * min(took), 1),
                "best_tokens_per_second": round(tokens / min(took)),
                "of_bf16": round(statistics.median(ratios), 3),
                "quartiles": [round(ratios[i * ROUNDS // 4], 3) for i in (1, 3)],
                "best_of_bf16": round(min(base) / min(took), 3),
            }
        )
    about = {"machine": machine(), "threads": torch.get_num_threads(), "rounds": ROUNDS}
    return {**about, "bf16_instruction": bf16.available(), "recipes": rows}


def table(result: dict) -> str:
    m = result["machine"]
    lines = [
        f"{m['cpu']}, {result['threads']} thread, torch {m['torch']}, numba {m['numba']}, "
        f"{m['date']}; median (and best) of {result['rounds']} steps, tokens/s of the best.",
        "",
        "| recipe | ms a step (best) | tokens/s | of bf16's, median (quartiles) |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in result["recipes"]:
        low, high = row["quartiles"]
        lines.append(
            f"| {row['recipe']} | {row['median_ms']:.1f} ({row['best_ms']:.1f}) | "
            f"{row['best_tokens_per_second']:,} | {row['of_bf16']:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    if "--table" not in sys.argv:
        torch.set_num_threads(1)
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    text = table(json.loads(RESULT.read_text()))
    print(text)
    rewrite(PAGE, text, *MARK)


if __name__ == "__main__":
    main()
