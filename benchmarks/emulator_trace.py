"""Draw what the emulator's trace of a GEMM kernel holds: docs/assets/emulator_trace.png.

The kernel is gemm_mxfp8 of tests/emulator/pipelines: a warp that loads, one that multiplies, four
that store. Time is the number of instructions that were run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from blockscale import emulator as em

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "emulator"))
from pipelines import PIPELINES, mxfp8  # noqa: E402

COLOURS = {"run": "#1f4e79", "wait": "#d9d9d9", "work": "#e08214"}
LABELS = {"run": "runs", "wait": "waits", "work": "asynchronous work in flight"}
ROLES = {"warp 0": "loads", "warp 1": "multiplies"} | {f"warp {i}": "stores" for i in range(2, 6)}


def main() -> None:
    pipeline, case = PIPELINES["gemm_mxfp8"], mxfp8(3, 3)
    report = em.Device(pipeline.target, completion="random", seed=1).launch(
        pipeline.ptx, "gemm_mxfp8", pipeline.grid, pipeline.block, case.args,
        shared=pipeline.shared, trace=True,
    )  # fmt: skip
    engines = ["TMA loads", "tensor core", "Tensor Memory", "TMA stores"]
    rows = [f"warp {i}" for i in range(6)] + engines
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    for s in sorted(report.slices, key=lambda s: s.kind != "wait"):
        axes.barh(
            rows.index(s.row), max(s.end - s.start, 4), left=s.start, height=0.7,
            color=COLOURS[s.kind], alpha=0.45 if s.kind == "work" else 1,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"{r} ({ROLES[r]})" if r in ROLES else r for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("instructions run by the CTA")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        handles=[Patch(color=COLOURS[k], label=LABELS[k]) for k in COLOURS],
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
    )  # fmt: skip
    figure.savefig(ROOT / "docs" / "assets" / "emulator_trace.png", dpi=150)


if __name__ == "__main__":
    main()
