"""What ``gpu_moe.py`` and ``gpu_sonic_moe.py`` measured of layers of experts, and what the model
says of them: docs/lab/experts.md, from benchmarks/results/moe_h200.json and sonic_moe_h200.json.
Needs no GPU.

PYTHONPATH=../src:. python3 moe_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exact_tables import LAB, RESULTS, table
from gpu_quantize import rewrite

from blockscale.bench.contest import BASELINE, OURS
from blockscale.bench.moe import ONCE, REUSED
from blockscale.bench.moe_shapes import SHAPES, Shape
from blockscale.bench.moe_work import Work, work
from blockscale.formats import get_format
from blockscale.model import MACHINES, Machine, estimate, launch

MARKS = "<!-- {}: made by benchmarks/moe_tables.py -->", "<!-- {}: end -->"
#: Architecture, and the name of what is multiplied.
CASES = (("sm_90a", "fp8_block"), ("sm_100a", "mxfp8"), ("sm_100a", "nvfp4"))
#: Steps that are not of a pass, and those that reused weights do without.
_BESIDE, _WEIGHTS = "quantize both", "weights, "


def microseconds(step: Work, arch: str, format: str, machine: Machine) -> float:
    """Of a launch, with a cold L2 cache."""
    if step.product is None:
        return 1e6 * step.nbytes / machine.memory_rate + machine.launch
    m, n, k, groups = step.product
    sizes = tuple(m // groups + (i < m % groups) for i in range(groups))
    return estimate(launch(arch, format, (m, n, k), groups=sizes), machine).microseconds


def layer(shape: Shape, arch: str, format: str) -> dict[str, float]:
    """Milliseconds of forward, and of both, weights quantized in the step or before; and how much
    of these the products take."""
    size = get_format("mxfp8" if format == "fp8_block" else format).element.bits / 8
    steps = {
        what: microseconds(step, arch, format, MACHINES[arch]) / 1e3
        for what, step in work(shape, size, size).items()
        if not what.startswith(_BESIDE)
    }
    of_weights = {what: took for what, took in steps.items() if what.startswith(_WEIGHTS)}
    names = list(steps)
    forward = sum(steps[what] for what in names[: names.index("combine") + 1])
    reused = sum(steps.values()) - sum(of_weights.values())
    known = work(shape, size, size)
    products = sum(took for what, took in steps.items() if known[what].product)
    return {
        "forward": forward + of_weights["weights, rows"],
        "both": sum(steps.values()),
        "reused": reused,
        "products": products / reused,
    }


def estimates() -> str:
    lines = []
    for model, shape in SHAPES.items():
        for arch, format in CASES:
            found = layer(shape, arch, format)
            times = (f"{found[key]:.1f}" for key in ("forward", "both", "reused"))
            machine = MACHINES[arch].name
            lines.append([f"{model}, {machine}, {format}", *times, f"{found['products']:.0%}"])
    heads = "forward", "and backward", "weights reused", "of which products"
    return table(["ms", *heads], lines)


def passes(recipe: str) -> list[tuple[str, list[str]]]:
    """What is timed, and the cases of it: weights quantized in each pass, in one read, before."""
    once, reused = (f"{recipe}, {how}" for how in (ONCE, REUSED))
    return [("forward", [recipe, reused]), ("forward and backward", [recipe, once, reused])]


def microseconds_of(layer: Mapping[str, Any], what: str, case: str, who: str) -> float:
    found = [
        row["microseconds"]
        for row in layer["rows"]
        if (row["group"].split(", ")[1], row["case"], row["who"]) == (what, case, who)
    ]
    return float(found[0])


def layers(found: Mapping[str, Any]) -> str:
    """Milliseconds, and how many times as long torch takes; bytes that are kept of a token."""
    lines = []
    for model, layer in found.items():
        for recipe, memory in layer["memory"].items():
            cells = []
            for what, cases in passes(recipe):
                theirs = microseconds_of(layer, what, recipe, BASELINE)
                for case in cases:
                    took = microseconds_of(layer, what, case, OURS)
                    cells.append(f"{took / 1e3:.2f} ({theirs / took:.2f})")
                cells.append(f"{theirs / 1e3:.1f}")
            kept = f"{memory['kept']:,.0f}"
            lines.append([f"{model}, {recipe}", *cells, kept, f"{memory['error']:.3f}"])
    heads = (
        *("forward", "weights reused", "torch"),
        *("and backward", "weights in one read", "weights reused", "torch", "kept", "error"),
    )
    return table(["ms (times as fast)", *heads], lines)


def peers(found: Mapping[str, Any], peer: Mapping[str, Any], recipe: str) -> str:
    """Milliseconds of sonic-moe in bf16, and how many times as long as ours it takes; bytes of a
    token that it keeps, and ours as a share of them."""
    lines = []
    for model, theirs in peer.items():
        cells = [model]
        for (what, cases), key in zip(passes(recipe), ("forward", "both"), strict=True):
            cells.append(f"{theirs[key] / 1e3:.2f}")
            took = (microseconds_of(found[model], what, case, OURS) for case in cases)
            cells += [f"{theirs[key] / each:.2f}" for each in took]
        kept = found[model]["memory"][recipe]["kept"]
        lines.append([*cells, f"{theirs['kept']:,.0f}", f"{kept / theirs['kept']:.2f}"])
    ours = "ours, times as fast", "weights reused"
    heads = "sonic-moe forward, ms", *ours, "and backward, ms", ours[0], "in one read", ours[1]
    return table(["", *heads, "kept", "ours / theirs"], lines)


def steps(found: Mapping[str, Any], recipe: str) -> str:
    """Microseconds of each, and its floor's share of them."""
    times = {
        model: {s["what"]: s for s in layer["stages"] if s["recipe"] == recipe}
        for model, layer in found.items()
    }
    lines = []
    for what in next(iter(times.values())):
        cells = [what]
        for each in times.values():
            took, floor = each[what]["microseconds"], each[what]["floor"]
            cells.append(f"{took:,.0f}" + (f" ({floor / took:.2f})" if floor else ""))
        lines.append(cells)
    return table(["microseconds (floor / time)", *times], lines)


def main() -> None:
    result = json.loads((RESULTS / "moe_h200.json").read_text())
    found = result["layers"]
    beside = json.loads((RESULTS / "sonic_moe_h200.json").read_text())  # with ours of that day
    made = {
        "layers": layers(found),
        "peers": peers(beside["blockscale"], beside["layers"], "fp8_block"),
        "steps": steps(found, "fp8_block"),
        "estimates": estimates(),
    }
    for name, text in made.items():
        rewrite(LAB / "experts.md", text, *(mark.format(name) for mark in MARKS))


if __name__ == "__main__":
    main()
