"""Show how good the choice of a tiling is at shapes drawn at random, and at named ones.

Writes tables of docs/lab/chooser.md, and docs/assets/tiles.png, from what ``gpu_tiles.py`` measured
(benchmarks/results/tiles). A time of ours is that of the tiling with the least estimate today, of
those that were measured. A shape that was measured again counts once, as it was last. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median, quantiles
from typing import Any

from fit_tiles import PRODUCTS, name, read
from gpu_quantize import ROOT, rewrite
from gpu_tiles import NAMED, Shape
from matplotlib.figure import Figure

RESULTS = ROOT / "benchmarks" / "results" / "tiles"
PICTURE = ROOT / "docs" / "assets" / "tiles.png"
PAGE = ROOT / "docs" / "lab" / "chooser.md"
BEGIN = "<!-- tiles: made by benchmarks/tile_tables.py -->"
END = "<!-- tiles: end -->"
TITLES = {
    "fp8": "FP8, 1x128 by 128x128",
    "fp8_1x128": "FP8, 1x128 by 1x128, added to fp32",
    "bf16": "bf16",
}
_SMALL = 8 << 20  # elements of weights
_WORST = 5
_BEST = "best tiling"
# Okabe-Ito: told apart by colour-blind readers. One for each, in all panels.
_COLOURS = {"DeepGEMM": "#E69F00", "cuBLASLt": "#009E73", "bf16": "#56B4E9", _BEST: "#0072B2"}
_LABELS = {"bf16": "torch's bf16", _BEST: "best tiling of ours"}


@dataclass(frozen=True)
class Measured:
    """Microseconds at a shape: of the chosen tiling, and of others by name."""

    gpu: str
    shape: Shape
    tilings: int  # that were measured
    tiling: tuple[Any, ...]
    chosen: float
    others: dict[str, float]

    def ratio(self, who: str) -> float:
        return self.others[who] / self.chosen


#: Where shapes lie; the first that holds counts.
PLACES: dict[str, Callable[[int, int, int], bool]] = {
    "named": lambda m, n, k: (m, n, k) in NAMED,
    "weights below 8 M": lambda m, n, k: n * k < _SMALL,
    "up to 64 rows": lambda m, n, k: m <= 64,
    "65 to 1024 rows": lambda m, n, k: m <= 1024,
    "more than 1024 rows": lambda m, n, k: True,
}


def measured(product: str) -> list[Measured]:
    found = {(each.gpu, each.shape): each for each in _measured(product)}
    return list(found.values())


def _measured(product: str) -> Iterator[Measured]:
    tilings, block_k = PRODUCTS[product]
    for file in sorted(RESULTS.glob(f"{product}_h*.json")):
        _, name_of_gpu, gpu, rows = read(file)
        for row, took in rows:
            shape = m, n, _ = tuple(row["shape"])
            times = {
                name(each): each.nanoseconds(shape, block_k, gpu)
                for each in tilings
                if name(each) in took and each.is_legal(m, n, gpu)
            }
            chosen = min(times, key=times.__getitem__)
            others = {**row["peers"], _BEST: min(took.values())}
            yield Measured(name_of_gpu, shape, len(took), chosen, took[chosen], others)


def place(shape: Shape) -> str:
    return next(name for name, holds in PLACES.items() if holds(*shape))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Numbers from the third column on."""
    marks = ["---" if i < 2 else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, marks, *lines])


def overview(product: str, found: Sequence[Measured]) -> str:
    """How much was measured."""
    counts = sorted(each.tilings for each in found)
    return (
        f"{len(found)} shapes on {_gpus(found)}, {counts[0]} to {counts[-1]} tilings measured at "
        f"each, {median(counts):.0f} in the median; the estimate chooses among "
        f"{len(PRODUCTS[product][0])}."
    )


def _gpus(found: Sequence[Measured]) -> str:
    return " and ".join(dict.fromkeys(each.gpu for each in found))


def distribution(found: Sequence[Measured]) -> str:
    """Of the time of others over ours, place by place."""
    lines = []
    for where in PLACES:
        here = [each for each in found if place(each.shape) == where]
        for who in dict.fromkeys(who for each in here for who in each.others):
            ratios = sorted(each.ratio(who) for each in here if who in each.others)
            twentieths = quantiles(ratios, n=20, method="inclusive") if len(ratios) > 1 else []
            shown = [geometric_mean(ratios), ratios[0], *(twentieths[i] for i in (0, 1, 9))]
            lines.append([where, who, str(len(ratios)), *(f"{each:.3f}" for each in shown)])
    head = ["where", "time of ...", "shapes", "mean", "least", "5 % below", "10 % below", "median"]
    return table(head, lines)


def worst(found: Sequence[Measured], peer: str) -> str:
    """Where others are ahead most, and how far the best tiling is."""
    having = sorted((each for each in found if peer in each.others), key=lambda e: e.ratio(peer))
    lines = [
        [
            " x ".join(map(str, each.shape)),
            _tiling(each.tiling),
            f"{each.chosen:.1f}",
            f"{each.others[_BEST]:.1f}",
            f"{each.others[peer]:.1f}",
            f"{each.ratio(peer):.3f}",
        ]
        for each in having[:_WORST]
    ]
    return table(["M x N x K", "tiling", "us", _BEST, peer, "ratio"], lines)


def _tiling(fields: tuple[Any, ...]) -> str:
    (rows, columns), (down, across), warpgroups, turns, split_k = fields
    shown = f"{rows} x {columns}, {warpgroups} warpgroup" + "s" * (warpgroups > 1)
    shown += " in turn" if turns else ""
    shown += f", cluster {down} x {across}" if down * across > 1 else ""
    return shown + (f", K in {split_k}" if split_k > 1 else "")


def named(found: Sequence[Measured]) -> str:
    """Each time a named shape was measured."""
    here = sorted((each for each in found if each.shape in NAMED), key=lambda e: e.shape)
    others = list(dict.fromkeys(who for each in here for who in each.others))
    lines = [
        [
            " x ".join(map(str, each.shape)),
            _tiling(each.tiling),
            f"{each.chosen:.1f}",
            *(f"{each.ratio(who):.3f}" if who in each.others else "" for who in others),
        ]
        for each in here
    ]
    return table(["M x N x K", "tiling", "us", *others], lines)


def draw(products: dict[str, list[Measured]]) -> Figure:
    """How many shapes have a ratio of at most so much, for each peer."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(products), sharey=True)
    for axes, (product, found) in zip(panels, products.items(), strict=True):
        for who in dict.fromkeys(who for each in found for who in each.others):
            ratios = sorted(each.ratio(who) for each in found if who in each.others)
            shares = [100 * (i + 1) / len(ratios) for i in range(len(ratios))]
            label = _LABELS.get(who, who)
            axes.step(ratios, shares, where="post", color=_COLOURS[who], label=label)
        axes.axvline(1, color="gray", linewidth=0.8)
        axes.set_xlim(0.6, 2.2)
        axes.set_title(TITLES[product], fontsize=9)
        axes.set_xlabel("its time / ours; above 1 ours is faster", fontsize=8)
        axes.legend(fontsize=7, loc="lower right")
    panels[0].set_ylabel("shapes with at most this ratio, %", fontsize=8)
    figure.suptitle(_gpus([each for found in products.values() for each in found]), fontsize=10)
    return figure


def main() -> None:
    products = {product: measured(product) for product in PRODUCTS}
    parts = []
    for product, found in products.items():
        parts += [f"### {TITLES[product]}", overview(product, found), distribution(found)]
        for peer in [who for who in found[0].others if who != _BEST]:
            ratios = [each.ratio(peer) for each in found if peer in each.others]
            ahead = f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)} shapes"
            parts += [f"{peer} is ahead at {ahead}. Its best five:"]
            parts += [worst(found, peer)]
        if any(each.shape in NAMED for each in found):
            parts += ["Squares, and one named shape:", named(found)]
    rewrite(PAGE, "\n\n".join(parts), BEGIN, END)
    draw(products).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
