"""What docstrings of blockscale.jax show runs, and all names have a reference."""

from __future__ import annotations

import doctest
import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import blockscale as bs
import blockscale.jax as bsj

#: Shown in jax.shard_map, where a name of an axis means something.
SHARDED = ("all_gather", "global_scale")


@pytest.mark.parametrize("name", [each for each in bsj.__all__ if each not in SHARDED])
def test_example(name):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    names = {"jax": jax, "jnp": jnp, "bsj": bsj, "bs": bs, "torch": torch, "nnx": nnx}
    names |= {"functools": functools, "q": bsj.quantize(jnp.ones((256, 512)), "mxfp8")}
    names |= {"x": torch.ones(8, 512, dtype=torch.bfloat16)}
    examples = doctest.DocTestParser().get_examples(getattr(bsj, name).__doc__)
    assert examples
    for example in examples:
        if example.want:
            assert f"{eval(example.source, names)!r}\n" == example.want
        else:
            exec(example.source, names)


def test_every_name_is_in_the_reference():
    page = Path(__file__).parents[2] / "docs" / "reference" / "jax.md"
    shown = {line.rsplit(".", 1)[-1] for line in page.read_text().splitlines() if "::: " in line}
    assert shown == {*bsj.__all__} - {"Seed"}  # which torch's side has, too
