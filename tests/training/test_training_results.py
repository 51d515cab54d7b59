"""From runs to rows, sentences, JSON, picture and page; and where they are written."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from blockscale.training import (
    RECIPES,
    Comparison,
    Run,
    Settings,
    Text,
    prepare_folder,
    write_report,
)
from blockscale.training.report import COLUMNS, cells, html
from blockscale.training.results import _is_separated

SQNR = {"activations": 31.5, "weights": 31.0, "gradients": 30.5}


def run(recipe, seed, final, saturated=0.0):
    statistics = {
        role: {"elements": 1000, "saturated_per_million": saturated, "sqnr_db": db}
        for role, db in SQNR.items()
    }
    return Run(
        recipe,
        seed,
        parameters=1_000_000,
        train_loss=[4.0, 3.0, final + 0.1],
        validation=[(1, 4.0), (3, final)],
        statistics={} if recipe == "bf16" else statistics,
    )


def comparison(finals, **kwargs):
    """From {recipe: [final validation loss of each seed]}."""
    runs = [
        run(name, seed, v, **kwargs) for name, vs in finals.items() for seed, v in enumerate(vs)
    ]
    settings = Settings(steps=3, seeds=len(next(iter(finals.values()))))
    text = Text("a <text>", b"to be ", b"or not", "the second half")
    return Comparison(runs, settings, text, 12.3)


THREE = {
    "bf16": [2.0, 2.1, 2.2],
    "mxfp8": [2.002, 2.1021, 2.2022],
    "mxfp8_e5m2_grad": [2.0221, 2.1231, 2.2243],
    "mxfp8_floor": [2.01, 2.09, 2.2022],
}


def test_rows():
    bf16, mxfp8, _, floor = comparison(THREE, saturated=7.0).rows()
    assert (bf16.recipe, bf16.difference, bf16.saturated_per_million) == ("bf16", None, None)
    assert bf16.sqnr_db is None
    assert bf16.validation_loss == pytest.approx(2.1)
    assert bf16.train_loss == pytest.approx(2.2)
    assert mxfp8.difference == pytest.approx(0.0021)
    assert mxfp8.difference_percent == pytest.approx(0.1)
    assert mxfp8.spread_percent == pytest.approx(0, abs=1e-9)
    assert mxfp8.saturated_per_million == pytest.approx(7.0)
    assert mxfp8.sqnr_db == pytest.approx(SQNR)
    assert floor.spread_percent > 0.3


def test_one_seed_has_no_spread():
    _, mxfp8 = comparison({"bf16": [2.0], "mxfp8": [2.002]}).rows()
    assert mxfp8.spread_percent is None
    assert cells(mxfp8)[COLUMNS.index("in %")] == "+0.10"


def test_without_the_baseline_nothing_is_compared():
    (row,) = comparison({"mxfp8": [2.0, 2.1]}).rows()
    assert (row.difference, row.difference_percent, row.spread_percent) == (None, None, None)
    assert comparison({"mxfp8": [2.0, 2.1]}).verdict() == []


def test_cells_match_the_columns():
    for row in comparison(THREE).rows():
        assert len(cells(row)) == len(COLUMNS)
    assert cells(comparison(THREE).rows()[0])[3:] == ["–"] * 6


def test_verdict_says_what_is_separated_and_what_is_not():
    parity, ablations = comparison(THREE).verdict()
    assert parity.startswith("mxfp8 ends +0.10 % from bf16 in validation loss (spread over 3 seeds")
    assert parity.endswith("within 0.5 %.")
    assert "separated from mxfp8 by more than the spread: mxfp8_e5m2_grad;" in ablations
    assert "not separated from mxfp8 at this scale: mxfp8_floor." in ablations


def test_verdict_of_one_seed_does_not_claim_a_difference():
    _, sentence = comparison({k: v[:1] for k, v in THREE.items()}).verdict()
    assert "One seed has no spread" in sentence
    assert "mxfp8_e5m2_grad +1.00 %" in sentence


def test_verdict_beyond_parity():
    assert "outside 0.5 %" in comparison({"bf16": [2.0] * 2, "mxfp8": [2.02] * 2}).verdict()[0]


@pytest.mark.parametrize(
    ("differences", "separated"),
    [
        ([0.1, 0.1, 0.1], True),
        ([0.10, 0.11, 0.12], True),
        ([0.1, 0.2, 0.3], False),  # t = 3.46 is below 4.30
        ([-0.3, -0.31, -0.29], True),
        ([0.0, 0.0], False),
        ([math.nan, 1.0], False),
        ([0.1] * 30 + [0.2] * 30, True),
    ],
)
def test_separation_is_students_t(differences, separated):
    assert _is_separated(differences) == separated


def test_json_is_complete_and_strict():
    found = json.loads(json.dumps(comparison(THREE).to_json(), allow_nan=False))
    assert found.keys() == {
        "schema", "created", "seconds", "settings", "parameters", "text", "versions", "recipes",
        "table", "verdict", "runs",
    }  # fmt: skip
    assert found["schema"] == 1
    assert found["recipes"]["bf16"] is None
    assert found["recipes"]["mxfp8_floor"]["scale_rounding"] == "floor"
    assert found["text"]["bytes"] == 12
    assert len(found["runs"]) == 12
    assert found["runs"][0]["validation"] == [[1, 4.0], [3, 2.0]]
    assert [row["recipe"] for row in found["table"]] == list(THREE)
    assert {"python", "torch", "blockscale", "numba", "platform"} <= found["versions"].keys()


@pytest.mark.parametrize(
    "finals",
    [
        THREE,
        {"bf16": [2.0]},
        {"mxfp8": [2.0]},
        {"bf16": [2.0, 2.0], "nvfp4": [2.1, math.nan]},
        {"bf16": [math.nan], "mxfp4": [math.inf]},
        {name: [2.0, 2.1] for name in RECIPES},
    ],
)
def test_a_report_of_anything(tmp_path, finals):
    """One recipe, all of them, and runs that diverged."""
    write_report(comparison(finals), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"loss.png", "report.html", "results.json"}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert list(found["recipes"]) == list(finals)


def test_the_page_needs_no_other_file():
    page = html(comparison(THREE), b"PNG")
    assert "a &lt;text&gt;" in page
    assert "<text>" not in page
    assert re.findall(r'(?:src|href)="([^"]{0,22})', page) == ["data:image/png;base64,"]
    for sentence in comparison(THREE).verdict():
        assert sentence in page
    assert page.count("<tr>") == 1 + len(THREE) + page.count("<tr><th>") - 1


# --- the folder -----------------------------------------------------------------------------------


def test_folders_are_numbered(tmp_path):
    names = [prepare_folder(None, tmp_path / "runs").name for _ in range(3)]
    assert names == ["train-001", "train-002", "train-003"]


def test_a_new_or_an_empty_folder(tmp_path):
    out = tmp_path / "a" / "b"
    assert prepare_folder(out) == out
    assert prepare_folder(out) == out


def test_other_files_are_not_touched(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match=r"out: .*holds other files; name a new or an empty"):
        prepare_folder(tmp_path)
    for out in (tmp_path / "mine", tmp_path / "mine" / "below"):
        with pytest.raises(ValueError, match=r"out: .*name a "):
            prepare_folder(out)
    assert (tmp_path / "mine").read_text() == "mine"
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that nobody can write to"
)
@pytest.mark.parametrize("given", [True, False])
def test_a_folder_that_cannot_be_made(given):
    nowhere = Path("/proc/none")
    with pytest.raises(ValueError, match=r"out: cannot make .*written to with --out"):
        prepare_folder(nowhere) if given else prepare_folder(None, nowhere)
