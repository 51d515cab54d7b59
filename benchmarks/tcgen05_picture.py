"""Draw docs/assets/tcgen05.png: one tile of scales, and its bytes in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from blockscale.layouts import TILE_BLOCKS, TILE_BYTES, TILE_ROWS, Tcgen05

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "tcgen05.png"

# Okabe-Ito: told apart by colour-blind readers
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def tcgen05_tile() -> Figure:
    """One 128x4 tile of scales: the matrix on the left, its 512 bytes of memory on the right.

    Drawn from ``Tcgen05.offset`` itself, so the picture cannot differ from the code.
    """
    layout, shape = Tcgen05(), (TILE_ROWS, TILE_BLOCKS)
    place = {
        layout.offset(row, block, shape): (row, block)
        for row in range(TILE_ROWS)
        for block in range(TILE_BLOCKS)
    }
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 3.2))

    matrix = np.array([[row // 32] * TILE_BLOCKS for row in range(TILE_ROWS)])
    memory = np.array([place[offset][0] // 32 for offset in range(TILE_BYTES)]).reshape(32, 16)
    for axes, image in ((left, matrix), (right, memory)):
        axes.imshow(
            np.array([[_rgb(_COLOURS[c]) for c in line] for line in image]),
            aspect="auto",
            alpha=0.55,
        )
    marks = ((0, 0), (5, 0), (5, 1), (32, 0), (64, 2), (127, 3))
    for row, block in marks:
        left.text(block, row, f"{row},{block}", ha="center", va="center", fontsize=6, weight="bold")
    for offset, (row, block) in place.items():
        bold = (row, block) in marks
        right.text(
            offset % 16,
            offset // 16,
            f"{row},{block}",
            ha="center",
            va="center",
            fontsize=6.5,
            weight="bold" if bold else "normal",
            color="black" if bold else "#333333",
        )
    left.set(title="scales: row, block along K", xlabel="block", ylabel="row")
    left.set_xticks(range(TILE_BLOCKS))
    left.set_yticks([0, 32, 64, 96, 127])
    right.set(title="memory: 32 lines of 16 bytes, each byte named row,block", xlabel="byte")
    right.set_ylabel("offset of the line")
    right.set_xticks(range(16))
    right.set_yticks(range(0, 32, 4), [str(16 * line) for line in range(0, 32, 4)])
    for edge in (3.5, 7.5, 11.5):
        right.axvline(edge, color="white", linewidth=2)
    figure.suptitle("tcgen05: offset = (row % 32) * 16 + (row // 32) * 4 + block")
    return figure


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


if __name__ == "__main__":
    tcgen05_tile().savefig(PICTURE, dpi=110)
