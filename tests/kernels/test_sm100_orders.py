"""Blackwell's products in many orders: the bits of the reference, no races, nothing left behind.

Here each kernel runs once, in one of the orders; ``benchmarks/sm100_orders.py`` runs each in all of
them and writes what is checked at the end. Races, reads of what nobody wrote, Tensor Memory that is
not freed and copies still in flight at the end are errors of the emulator: a run that returns has
none (``check="all"``).
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm100_orders import CASES, EPILOGUES, LAYOUTS, ONE_TILE, ORDERS, PAIRS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "sm100_orders.json"
SPREAD = [(name, *ORDERS[i % len(ORDERS)]) for i, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "completion", "seed"), SPREAD)
def test_in_some_order(name: str, completion: str, seed: int) -> None:
    assert CASES[name].right(completion, seed)


@pytest.mark.parametrize("name", ONE_TILE)
def test_one_tile(name: str) -> None:
    assert ONE_TILE[name].right("random", 1)


def test_cases_are_complete() -> None:
    """All formats, layouts, epilogues and clusters, with one and with two CTAs; all orders."""
    configs = [case.config for case in CASES.values()]
    ctas = (1, 2)
    assert {((c.a_format, c.b_format), c.ctas) for c in configs} == set(product(PAIRS, ctas))
    assert {(c.majors, c.ctas) for c in configs} == set(product(LAYOUTS.values(), ctas))
    found = {(name.rpartition(", ")[2], case.config.ctas) for name, case in CASES.items()}
    assert found == set(product(EPILOGUES, ctas))
    clusters = {(2, 1), (2, 2), (4, 1)}
    assert {(c.cluster, c.ctas) for c in configs} == {((1, 1), 1), *product(clusters, ctas)}
    assert {c.acc_stages for c in configs} == {1, 2}, "overlapping accumulators, and others"
    assert {(completion, seed) for _, completion, seed in SPREAD} == set(ORDERS)


def test_shapes_come_to_everything() -> None:
    for case in CASES.values():
        (m, n, k), config = case.shape, case.config
        rows, columns = config.tile[0] * config.cluster[0], config.mma_n * config.cluster[1]
        assert -(-m // rows) * -(-n // columns) >= (4 if config.cluster_size == 1 else 3)
        assert k > config.stages * config.kind.block_k
        assert m % 128
        assert n % columns
        assert k % config.kind.block_k or any(config.unpacked)


def test_every_order_was_run() -> None:
    """What is committed is of these kernels, shapes and orders."""
    found = json.loads(RESULTS.read_text())
    assert [tuple(order) for order in found["orders"]] == list(ORDERS)
    assert set(found["cases"]) == set(CASES)
    for name, case in CASES.items():
        entry = found["cases"][name]
        assert tuple(entry["shape"]) == case.shape
        assert entry["right"] == len(ORDERS)
    assert found["runs"] == found["right"] == len(CASES) * len(ORDERS)
