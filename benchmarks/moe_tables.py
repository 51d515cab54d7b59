"""What the model says of layers of experts: docs/lab/experts.md. Needs no GPU.

PYTHONPATH=../src:. python3 moe_tables.py
"""

from __future__ import annotations

from exact_tables import LAB, table
from gpu_quantize import rewrite

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


def main() -> None:
    marks = tuple(mark.format("estimates") for mark in MARKS)
    rewrite(LAB / "experts.md", estimates(), *marks)


if __name__ == "__main__":
    main()
