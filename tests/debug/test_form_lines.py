"""Lines of a step are those of each tensor and product by itself, written by json."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from blockscale.debug.form_lines import lines_of
from blockscale.debug.form_samples import About
from blockscale.formats import FP32, UE4M3, Format, formats
from blockscale.kernels.common import watch_vector as at
from blockscale.kernels.cpu.spec import scale_values

UE4M3_VALUES = scale_values(UE4M3).view(np.float32).tolist()
Call = tuple[About, np.ndarray]


def call(rng: np.random.Generator) -> Call:
    """Of any format, some with NaN, some of zeros alone, some whose values nobody has."""
    format = list(formats.values())[rng.integers(len(formats))]
    lead = (3,) * int(rng.integers(2))
    about = About(format, (*lead, 64, 96), int(rng.choice([-1, -2])), (*lead, 4, 7))
    vector, nan = np.zeros(at.LENGTH), at.nan_code(format)
    codes = vector[at.CODES_AT : at.SUMS_AT]
    codes[rng.integers(0, nan, rng.choice([0, 1, 40]))] = rng.integers(1, 1 << 31)
    codes[:2] += rng.integers(0, 3, 2)
    codes[nan] = rng.choice([0, 0, 0, 5])
    vector[at.FIRST_BLOCK] = rng.integers(28 * 3 ** len(lead))
    scalars = [0.0, 1.0, 2.0**-149, 3e38, math.inf, float(np.float32(rng.random()))]
    vector[at.GLOBAL_SCALE] = rng.choice(scalars) if format.has_global_scale else math.nan
    if rng.random() < 0.2:
        vector[at.AMAX] = vector[at.SUMS_AT :] = math.nan
        return about, vector
    vector[at.AMAX] = rng.choice([0, 1.5, 3e38, math.inf, math.nan])
    n = rng.choice([0, 4096])
    energy = n * rng.random(), rng.choice([0, rng.random(), math.inf])
    vector[at.SUMS_AT : at.OCTAVES_AT] = n, *energy, *rng.integers(0, n + 1, 3)
    vector[at.OCTAVES_AT : at.ELEMENT] = rng.integers(0, 200, at.OCTAVES)
    vector[at.ELEMENT] = rng.integers(math.prod(format.block) + 1)
    vector[at.VALUE] = rng.choice([math.nan, math.inf, -math.inf])
    return about, vector


def exponents_of(format: Format, vector: np.ndarray) -> list[tuple[int, int]]:
    """floor(log2) of scales, and how often each occurs, without those of zeros and NaN."""
    factor = 1.0 if math.isnan(vector[at.GLOBAL_SCALE]) else float(vector[at.GLOBAL_SCALE])
    found = []
    for code in range(2 if format.scale is FP32 else 1, at.nan_code(format)):
        times = int(vector[at.CODES_AT + code])
        if format.scale is UE4M3:
            found.append((math.frexp(UE4M3_VALUES[code] * factor)[1] - 1, times))
        else:
            found.append((code - 127, times))
    return [(exponent, times) for exponent, times in found if times]


def place_of(about: About, vector: np.ndarray) -> dict[str, Any]:
    """In the compact scales' matrix, the block; in the block, the element."""
    block, inside = int(vector[at.FIRST_BLOCK]), vector[at.ELEMENT]
    place = np.array(np.unravel_index(block, about.blocks))
    height, size = about.format.block
    tile = np.array([height, size] if about.axis == -1 else [size, height])
    place[-2:] *= tile
    named = None
    if inside < height * size:
        line = np.array(divmod(int(inside), size))
        place[-2:] += line if about.axis == -1 else line[::-1]
        named = str(float(vector[at.VALUE]))
    return {"first_nonfinite": place.tolist(), "first_nonfinite_value": named}


def line_of(calls: list[Call]) -> dict[str, Any]:
    first, vectors = calls[0][0], [vector for _, vector in calls]
    histogram: dict[int, int] = {}
    for about, vector in calls:
        for exponent, times in exponents_of(about.format, vector):
            histogram[exponent] = histogram.get(exponent, 0) + times
    ordered = sorted(histogram)
    percentiles = None
    if ordered:
        seen = np.cumsum([histogram[e] for e in ordered])
        shares = {"min": 0, "p1": 0.01, "p50": 0.5, "p99": 0.99, "max": 1}
        of = {name: ordered[np.argmax(seen >= s * seen[-1])] for name, s in shares.items()}
        percentiles = {**of, "spread": of["max"] - of["min"]}
    bad = [int(v[at.CODES_AT + at.nan_code(a.format)]) for a, v in calls]
    zeros = [v[at.CODES_AT :][: 2 if a.format.scale is FP32 else 1].sum() for a, v in calls]
    amax = max((v[at.AMAX] for v in vectors), key=lambda x: x if math.isfinite(x) else math.inf)
    total = [0.0] * (at.ELEMENT - at.SUMS_AT)
    for vector in vectors:
        total = [a + b for a, b in zip(total, vector[at.SUMS_AT :].tolist(), strict=False)]
    sums = dict(zip(at.SUMS, total, strict=False))
    knows = sums["compared"] > 0
    loses = knows and sums["signal"] and 0 < sums["noise"] < math.inf
    return {
        "format": first.format.name,
        "shape": list(first.shape),
        "calls": len(calls),
        "elements": sum(math.prod(a.shape) for a, _ in calls),
        "amax": amax if math.isfinite(amax) else None,
        "nonfinite_blocks": sum(bad),
        **(place_of(*calls[np.flatnonzero(bad)[0]]) if any(bad) else {}),
        "blocks": sum(math.prod(a.blocks) for a, _ in calls),
        "zero_blocks": int(sum(zeros)),
        "scale_log2": percentiles,
        "scale_histogram": {str(exponent): histogram[exponent] for exponent in ordered},
        "compared": int(sums["compared"]) if knows else 0,
        "sqnr_db": 10 * math.log10(sums["signal"] / sums["noise"]) if loses else None,
        "underflow": sums["flushed"] / sums["compared"] if knows else None,
        "saturated": sums["saturated"] / sums["compared"] if knows else None,
        "zeros": sums["zeros"] / sums["compared"] if knows else None,
        "magnitude_histogram": list(map(int, total[len(at.SUMS) :])) if knows else None,
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("most", [1, 12], ids=["one call", "many calls"])
def test_as_each_by_itself(most):
    rng = np.random.default_rng(most)
    for _ in range(60):
        steps = [
            [call(rng) for _ in range(rng.integers(1, most + 1))] for _ in range(rng.integers(1, 9))
        ]
        abouts = [about for calls in steps for about, _ in calls]
        vectors = np.stack([vector for calls in steps for _, vector in calls])
        heads = [json.dumps({"module": f'"{i}'})[:-1] for i in range(len(steps))]
        lines, nonfinite = lines_of(heads, abouts, vectors, [len(calls) for calls in steps])
        wanted = [{"module": f'"{i}', **line_of(calls)} for i, calls in enumerate(steps)]
        assert lines == [json.dumps(line) + "\n" for line in wanted]
        assert nonfinite == [i for i, line in enumerate(wanted) if line["nonfinite_blocks"]]
