"""The folder a comparison leaves behind: loss.png, report.html, results.json."""

from __future__ import annotations

import io
import json
import os
from html import escape
from pathlib import Path

from ..page import facts, image, page, table
from .curves import draw
from .results import Comparison, Row
from .saves import saved_runs

__all__ = ["COLUMNS", "cells", "prepare_folder", "write_report"]

#: Of the table, on the terminal and in the report.
COLUMNS = (
    "recipe",
    "train loss",
    "validation loss",
    "difference to bf16",
    "in %",
    "saturated per million",
    "SQNR (dB): activations",
    "weights",
    "gradients",
)


def cells(row: Row) -> list[str]:
    """A row of the table as text, one for each of COLUMNS."""
    percent = "–"
    if row.difference_percent is not None:
        percent = f"{row.difference_percent:+.2f}"
        if row.spread_percent is not None:
            percent += f" ± {row.spread_percent:.2f}"
    sqnr = row.sqnr_db or {}
    return [
        row.recipe,
        f"{row.train_loss:.4f}",
        f"{row.validation_loss:.4f}",
        "–" if row.difference is None else f"{row.difference:+.4f}",
        percent,
        "–" if row.saturated_per_million is None else f"{row.saturated_per_million:,.0f}",
        *(
            f"{sqnr[role]:.1f}" if role in sqnr else "–"
            for role in ("activations", "weights", "gradients")
        ),
    ]


def prepare_folder(out: Path | None, root: Path = Path("runs")) -> Path:
    """Make the folder for a report: ``out``, which may exist if empty, or ``root/train-001``, ...

    Raises ValueError where it holds files already or cannot be written to.
    """
    try:
        if out is None:
            root.mkdir(parents=True, exist_ok=True)
            return _next_folder(root)
        out.mkdir(parents=True, exist_ok=True)
        if saved_runs(out):
            raise ValueError(f"out: {out} holds unfinished runs; go on with --resume {out}")
        if any(out.iterdir()):
            raise ValueError(f"out: {out} holds other files; name a new or an empty folder")
        if not os.access(out, os.W_OK | os.X_OK):
            raise ValueError(f"out: {out} cannot be written to; name another folder")
        return out
    except FileExistsError:
        raise ValueError(f"out: {out or root} is a file; name a new or an empty folder") from None
    except OSError as error:
        raise ValueError(
            f"out: cannot make {out or root} ({error.strerror}); name a folder that can be "
            "written to with --out"
        ) from None


def _next_folder(root: Path) -> Path:
    number = 1
    while True:
        folder = root / f"train-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def write_report(comparison: Comparison, folder: Path) -> None:
    """Write loss.png, report.html (with the picture in it) and results.json into ``folder``."""
    picture = io.BytesIO()
    draw(comparison).savefig(picture, format="png", dpi=150)
    (folder / "loss.png").write_bytes(picture.getvalue())
    (folder / "report.html").write_text(html(comparison, picture.getvalue()), encoding="utf-8")
    text = json.dumps(comparison.to_json(), indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")


def html(comparison: Comparison, picture: bytes) -> str:
    """One page that needs no other file."""
    settings, text = comparison.settings, comparison.text
    about = {
        "model": f"{comparison.runs[0].parameters:,} parameters: {settings.layers} layers of width "
        f"{settings.width}, {settings.heads} heads, sequences of {settings.context} bytes",
        **_experts(comparison),
        "training": f"{settings.steps} steps of {settings.batch} sequences, AdamW at "
        f"{settings.learning_rate:g}, warmup and cosine",
        "seeds": f"{settings.seeds}, each with the same batches for every recipe",
        "text": f"{text['source']}, {text['bytes']:,} bytes, SHA-256 {text['sha256']}",
        "held out": f"{text['held_out']}, {text['held_out_bytes']:,} bytes",
        "device": settings.device,
        "made": f"{comparison.created} in {comparison.seconds:.0f} s",
        **comparison.versions,
    }
    return page(
        "blockscale train",
        "One model, several number formats",
        "<p>A byte-level GPT trained with the same seeds and batches; only the products of its "
        "transformer blocks differ. Losses are nats per byte.</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in comparison.verdict()),
        table(COLUMNS, map(cells, comparison.rows())),
        '<p class="note">Means over the seeds; after ± the standard deviation over them. The train '
        "loss is the mean of the last tenth of the steps. Saturated: elements larger than the "
        "largest value times their block's scale. SQNR: energy of the exact values over that of "
        "the error, along both axes that the products use.</p>",
        "<h2>Loss</h2>",
        image(picture, "Training and validation loss of each recipe, and the difference to bf16"),
        "<h2>How it was made</h2>",
        facts(about),
    )


def _experts(comparison: Comparison) -> dict[str, str]:
    """What a token meets, and how evenly, if there are experts."""
    settings = comparison.settings
    if not settings.experts:
        return {}
    most = {
        name: max(max(load) for run in comparison.of(name) for load in run.loads)
        for name in comparison.recipes
    }
    loads = ", ".join(f"{name} {value:.2f}" for name, value in most.items())
    return {
        "experts": f"{settings.experts} in each layer, {settings.top_k} of them for a token, "
        f"{settings.expert_size} wide inside; balancing loss times {settings.balance:g}",
        "the most tokens of an expert, over the mean, in the last validation": loads,
    }
