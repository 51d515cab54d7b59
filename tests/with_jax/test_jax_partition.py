"""Where operations are cut, and that those of sharded arrays have the bytes of whole ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from blockscale.jax.cut import Factor, Work, plan

CASES = Path(__file__).with_name("four_devices.py")
SIZES = {"d": 2, "t": 4}
K = Factor("summed", 64), Factor("summed", 32)
PRODUCT = Work(
    lambda cut: lambda *given: given,
    ((Factor("rows"), K[0]), (K[1], Factor("columns"))),
    ((Factor("rows"), Factor("columns")),),
    sums=("summed",),
    scatters=("rows", "columns"),
)


@pytest.mark.parametrize(
    ("operands", "result", "axes", "scattered"),
    [
        # rows and columns; the contraction of both, alike, as far as they are
        (((("d",), ()), ((), ("t",))), ((), ()), {"rows": ("d",), "columns": ("t",)}, {}),
        (((("d",), ("t",)), (("t",), ())), ((), ()), {"rows": ("d",), "summed": ("t",)}, {}),
        ((((), ("t", "d")), (("t",), ("d",))), ((), ()), {"summed": ("t",), "columns": ("d",)}, {}),
        # that of one is gathered, and an axis cuts one factor
        (((("d",), ()), (("d",), ())), ((), ()), {"rows": ("d",)}, {}),
        (((("d",), ()), ((), ("d",))), ((), ()), {"rows": ("d",)}, {}),
        (((("d",), ()), ((), ("d",))), ((), ("d",)), {"columns": ("d",)}, {}),
        # what the result wants, where operands are whole, or as it is summed
        ((((), ()), ((), ())), (("d",), ("t",)), {"rows": ("d",), "columns": ("t",)}, {}),
        ((((), ("d",)), (("d",), ())), (("d",), ()), {"summed": ("d",)}, {"rows": ("d",)}),
        ((((), ("d",)), (("d",), ())), (("t",), ()), {"summed": ("d",), "rows": ("t",)}, {}),
        # parts are equal, of whole units
        (((("t", "d"), ()), ((), ())), ((), ()), {"rows": ("t",)}, {}),
    ],
)
def test_plan(operands, result, axes, scattered):
    """Of 4 x 512 by 512 x 256, a contraction of 8 units."""
    shapes = (4, 8 * 64), (8 * 32, 256)
    found = plan(PRODUCT, shapes, operands, [result], SIZES)
    assert found.cut.axes == axes
    assert found.cut.scattered == scattered
    assert found.operands[0] == (axes.get("rows", ()), axes.get("summed", ()))
    rows = axes.get("rows", scattered.get("rows", ()))
    assert found.results == ((rows, axes.get("columns", ())),)


def test_units_are_not_cut():
    """Three blocks are not cut in two."""
    work = Work(PRODUCT.run, ((Factor("rows", 32),),), ((Factor("rows"),),))
    assert plan(work, [(96,)], [(("d",),)], [((),)], SIZES).cut.axes == {}
    assert plan(work, [(64,)], [(("d",),)], [((),)], SIZES).cut.axes == {"rows": ("d",)}


@pytest.mark.slow
@pytest.mark.parametrize("name", re.findall(r"def (test_\w+)", CASES.read_text()))
def test_four_devices(name, pytestconfig):
    """In a process of its own, whose CPU is four devices."""
    exhaustive = ["--exhaustive"] * pytestconfig.option.exhaustive
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *exhaustive,
         f"{CASES}::{name}"],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
