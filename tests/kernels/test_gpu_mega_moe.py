"""Experts over ranks, of one rank, by kernels in the emulator: the bits of its steps one by one."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import blockscale as bs
from blockscale import emulator as em
from blockscale.distributed import MegaMoE, PeerError
from stand_in import emulated, gpu, matrix

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOPK = 4, 128, 128, 20, 2


def weights(format: str) -> list[bs.ScaledTensor]:
    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    found = []
    for seed, (rows, columns) in enumerate(shapes):
        w = matrix(EXPERTS * rows, columns, seed=seed).view(EXPERTS, rows, columns) / 8
        if format == "nvfp4":
            found.append(torch.stack([bs.quantize(m, format) for m in w]))
        else:
            found.append(bs.quantize(w, format))
    return found


@pytest.mark.parametrize(("arch", "format", "activations"), [
    ("sm_90a", "fp8_128x128", "fp8_1x128"), ("sm_90a", "nvfp4", "fp8_1x128"),
    ("sm_100a", "nvfp4", "nvfp4"), ("sm_100a", "mxfp4", "mxfp8"),
])  # fmt: skip
def test_steps(arch, format, activations):
    up, down = weights(format)
    scales = {"a1_scale": 0.01, "a2_scale": 0.02} if activations == "nvfp4" else {}
    x, part = matrix(TOKENS, HIDDEN), torch.rand(TOKENS, TOPK)
    experts = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOPK].masked_fill(part < 0.1, -1)
    with emulated(arch, quantizes=True) as ran:
        how = {"activations": activations, "backend": "steps", **scales}
        moe = MegaMoE(up, down, tokens=TOKENS, topk=TOPK, **how)
        got = moe(x, part, experts)
        fused = [config for config in ran if getattr(config, "quantizing", None) is not None]
        assert len(fused) == (arch == "sm_100a")

        routing = bs.route(experts, EXPERTS)
        a = bs.quantize(x, activations, gather=routing.tokens, global_scale=scales.get("a1_scale"))
        h = bs.grouped_gemm(a, up.mT, routing.offsets)
        scalar = scales.get("a2_scale")
        (a,) = bs.swiglu_quantize(h, activations, axes=(-1,), global_scale=scalar)
        y = bs.grouped_gemm(a, down.mT, routing.offsets)
        want = bs.combine(y, routing.slots, part, BF16)
    assert torch.equal(got, want)
    wide = [w.dequantize(torch.float64) for w in (up, down)]
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for t, of_token in enumerate(experts.tolist()):
        for weight, expert in zip(part[t].double(), of_token, strict=True):
            if expert >= 0:
                gate, rise = (wide[0][expert] @ x[t].double()).chunk(2)
                hidden = torch.nn.functional.silu(gate) * rise
                exact[t] += weight * (wide[1][expert] @ hidden)
    error = (got.double() - exact).norm() / exact.norm()
    assert error < (0.25 if activations == "nvfp4" else 0.06)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_one_kernel(dtype):
    """It is taken where there is one; weights that change, and layers of experts, too."""
    up, down = weights("mxfp4")
    x, part = matrix(TOKENS, HIDDEN).to(dtype), torch.rand(TOKENS, TOPK)
    experts = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOPK]
    with emulated("sm_100a", quantizes=True):
        steps = MegaMoE(up, down, tokens=TOKENS, topk=TOPK, backend="steps")
        want = steps(x, part, experts)
        few = steps(x[:3], part[:3].double(), experts[:3].int())
    named = {}
    with (
        gpu("sm_100a", multiprocessors=4, quantizes=True),
        em.cutedsl(em.Device("sm_100a"), buffers=named) as ran,
    ):
        moe = MegaMoE(up, down, tokens=TOKENS, topk=TOPK)
        named["memory"] = moe._launch.memory.buffer
        ran.clear()
        assert torch.equal(moe(x, part, experts), want)
        assert len(ran) == 2  # the quantizer's, and that
        assert torch.equal(moe(x[:3], part[:3].double(), experts[:3].int()), few)
        assert moe(x[:0], part[:0], experts[:0]).shape == (0, HIDDEN)
        assert torch.equal(moe(x, part, bs.route(experts, EXPERTS)), want)
        with pytest.raises(ValueError, match="more than tokens=20"):
            moe(matrix(21, HIDDEN), torch.rand(21, TOPK), experts[:1].expand(21, -1))
        other = copy.deepcopy(moe)
        assert torch.equal(other(x, part, experts), want)
        assert other._launch.memory is moe._launch.memory
        with pytest.raises(TypeError, match="its memory cannot be saved"):
            pickle.dumps(moe)
        moe.up.qdata.zero_()
        assert not moe(x, part, experts).any()
        assert torch.equal(other(x, part, experts), want)
        moe._launch.missing.fill_(3)
        with pytest.raises(PeerError, match=r"rank 2 did not come within 100 s of a launch"):
            moe(x, part, experts)
        anew = MegaMoE(*weights("mxfp4"), tokens=TOKENS, topk=TOPK)
        named["memory"] = anew._launch.memory.buffer
        assert anew._launch.memory is not moe._launch.memory
        assert torch.equal(anew(x, part, experts), want)


def test_where_there_is_no_kernel():
    up, down = weights("mxfp4")
    how = {"tokens": TOKENS, "topk": TOPK, "backend": "kernel"}
    with pytest.raises(ValueError, match="there is no kernel: weights are on cpu"):
        MegaMoE(up, down, **how)
    with gpu("sm_90a"), pytest.raises(ValueError, match="no kernel: formats mxfp8 and mxfp4"):
        MegaMoE(up, down, **how)
    with gpu("sm_100a"), pytest.raises(ValueError, match="no kernel: intermediate size 64"):
        MegaMoE(up[:, :128], down[:, :, :64], **how)
    scale = {"a2_scale": torch.ones(EXPERTS), "activations": "nvfp4"}
    with gpu("sm_100a"), pytest.raises(ValueError, match="a2_scale: has one for each expert"):
        MegaMoE(*weights("nvfp4"), **how, **scale)
    with pytest.raises(ValueError, match="backend: got 'fast'"):
        MegaMoE(up, down, tokens=TOKENS, topk=TOPK, backend="fast")
