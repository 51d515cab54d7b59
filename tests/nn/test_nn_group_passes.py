"""torch's product of groups, which bf16 experts have on a GPU: it runs on a CPU, too."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs
from blockscale import reference
from blockscale.nn import group_passes
from blockscale.nn.group_passes import grouped_mm

ENDS = ([8, 8, 30], [0, 0, 0], [5, 6, 40], [0, 40, 40], [40, 40, 40])


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_grouped_mm(ends):
    """Rows of no group and groups of no rows have zeros, whatever was in memory."""
    a, b = torch.randn(40, 64).bfloat16(), torch.randn(3, 64, 32).bfloat16()
    g, offsets = torch.randn(40, 32).bfloat16(), torch.tensor(ends, dtype=torch.int32)
    for operands in ((a, b), (a, b.mT.contiguous().mT), (a.mT, g)):
        want = reference.grouped_gemm(*operands, offsets, out_dtype=torch.bfloat16)
        for _ in range(3):
            junk = [torch.full_like(want, float("nan")) for _ in range(8)]
            del junk
            got = grouped_mm(*operands, offsets)
            assert got.dtype == want.dtype
            assert torch.allclose(got.float(), want.float(), rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("recipe", [None, bs.Recipe("mxfp8", high_precision=("wgrad",))], ids=str)
def test_compiled(recipe, monkeypatch):
    """Without breaks, as on a GPU, and near what experts have one after another."""
    x, up, down = (torch.randn(n).bfloat16() for n in ((40, 64), (3, 64, 64), (3, 64, 32)))
    weights, ids = torch.rand(40, 2), torch.rand(40, 3).argsort(1)[:, :2]

    def step(x, up, down, weights):
        return bs.nn.experts(x, weights, bs.route(ids, 3), up, down, recipe=recipe)

    leaves = [each.requires_grad_() for each in (x, up, down, weights)]
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
        monkeypatch.setattr(group_passes, "_on_gpu", lambda x: True)
    for a, b in zip(*results, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * a.float().norm()


def test_layouts(monkeypatch):
    """Rows of any length, overlapping ones, a gradient column by column, many experts."""
    calls = []
    counted = lambda *args: calls.append(args) or grouped_mm(*args)  # noqa: E731
    monkeypatch.setattr(group_passes, "grouped_mm", counted)
    wide = torch.randn(40 * 8 + 128).bfloat16()
    cases = [
        (torch.randn(40, 64).bfloat16(), 3),
        (torch.randn(64, 40).bfloat16().mT, 3),
        (wide.unfold(0, 64, 8)[:40], 3),
        (torch.randn(40, 65).bfloat16()[:, 1:], 3),
        (torch.randn(40, 100).bfloat16(), 3),  # of some products rows are not aligned
        (torch.randn(40, 64).bfloat16(), 1024),
    ]
    for x, count in cases:
        hidden = x.shape[1]
        up, down = torch.randn(count, 32, hidden).bfloat16(), torch.randn(count, hidden, 16)
        ends = (torch.arange(1, count + 1) * 37 // count).int()
        leaves = [x.detach(), up, down.bfloat16()]
        results, grad = [], torch.randn(hidden, 40).bfloat16().mT
        for on_gpu in (False, True):
            monkeypatch.setattr(group_passes, "_on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
            x, up, down = (each.requires_grad_() for each in leaves)
            y = bs.nn.experts(x, None, ends, up, down, recipe=None)
            results.append([y, *torch.autograd.grad(y, leaves, grad)])
        assert (len(calls) > 0) == (count < 1024)
        for a, b in zip(*results, strict=True):
            assert b.is_contiguous() == a.is_contiguous()
            assert (a.float() - b.float()).norm() <= 2e-2 * a.float().norm()
        calls.clear()
