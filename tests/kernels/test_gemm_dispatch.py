"""``bs.gemm`` by kernels: CPU tensors count as those of a GPU, which is the emulator."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm90_inputs import FP32, WGMMA, assert_close

import blockscale as bs
from blockscale.kernels.common import runtime
from blockscale.kernels.common.gpu import dram_rate
from blockscale.ops import backends, gemm_sm90, gemm_sm100
from blockscale.ops.gemm_kernels import products_on
from stand_in import emulated, matrix


@dataclass(frozen=True)
class Machine:
    """A GPU, and operands that its kernels read as they are: formats and layouts of scales."""

    left: tuple[str, str]
    right: tuple[str, str]
    sums: float  # relative error of sums of products
    launched: list[Any] = field(default_factory=list)

    def operands(self, x: torch.Tensor, w: torch.Tensor, **how: Any):
        """``a`` and ``b`` of x (M, K) and of a weight w (N, K)."""
        a, b = (
            bs.quantize(each, format, layout=layout, **how)
            for each, (format, layout) in ((x, self.left), (w, self.right))
        )
        return a, b.mT

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        assert_close(got, want, got.dtype, self.sums)


MACHINES = {
    "sm_90a": Machine(("fp8_1x128", "sm90"), ("fp8_128x128", "compact"), WGMMA),
    # each 32 products are cut 2^-25 below the largest, sums to fp32
    "sm_100a": Machine(("mxfp8", "tcgen05"), ("mxfp8", "tcgen05"), 2**-18),
}


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch):
    found = MACHINES[request.param]
    with emulated(request.param) as launched:
        yield Machine(found.left, found.right, found.sums, launched)


def product(a, b) -> torch.Tensor:
    return a.dequantize(torch.float64) @ b.dequantize(torch.float64)


def test_out_bias_and_accumulate(machine):
    a, b = machine.operands(matrix(34, 128), matrix(40, 128, seed=1))
    start, bias = matrix(34, 40, seed=2), matrix(40, seed=3)
    want = product(a, b) + bias.double()
    for kind in (bias, bias.double(), torch.stack([bias, bias], 1)[:, 0]):
        out = torch.full((34, 48), 7.0)
        for _ in range(2):
            bs.gemm(a, b, out=out[:, :40], bias=kind)
            machine.check(out[:, :40], want)
            assert bool((out[:, 40:] == 7).all())
    column_major = start.mT.contiguous().mT
    for out in (start.clone(), column_major):
        assert bs.gemm(a, b, out=out, accumulate=True, bias=bias) is out
        machine.check(out, want + start.double())
    assert len(machine.launched) == 8
    for _ in range(2):  # remembered calls are checked
        with pytest.raises(ValueError, match="out: shares memory with bias"):
            bs.gemm(a, b, out=start, bias=start[3])


def test_remembered_calls_are_those_alike(machine):
    """What differs from a remembered call takes its own kernel and its own checks."""
    x, w = matrix(34, 256), matrix(40, 256, seed=1)
    a, b = machine.operands(x, w)
    for _ in range(2):
        bs.gemm(a, b)
    smaller, _ = machine.operands(x[:2], w)
    assert bs.gemm(smaller, b).shape == (2, 40)
    assert bs.gemm(a, b, FP32).dtype == FP32
    with pytest.raises(ValueError, match="a: is blocked along axis -2"):
        bs.gemm(b, a.mT)
    with pytest.raises(ValueError, match="accumulate: needs out"):
        bs.gemm(a, b, accumulate=True)
    with pytest.raises(ValueError, match="backend: got"):
        bs.gemm(a, b, backend="fast")
    negative, _ = machine.operands(x * -1, w)
    a.qdata.view(torch.uint8).copy_(negative.qdata.view(torch.uint8))
    machine.check(bs.gemm(a, b), product(a, b))  # the same memory, other values
    count = len(machine.launched)
    assert torch.equal(bs.gemm(a, b, backend="reference"), bs.gemm(a, b, backend="reference"))
    assert len(machine.launched) == count


def test_gradients_and_compiled_code(machine):
    a, b = machine.operands(matrix(34, 128), matrix(40, 128, seed=1))
    bias, c = matrix(40, seed=2).float().requires_grad_(), matrix(34, 40, seed=3).float()
    for _ in range(2):
        bias.grad = None
        bs.gemm(a, b, FP32, bias=bias).sum().backward()
        assert torch.equal(bias.grad, torch.full((40,), 34.0))
    with torch.no_grad():
        assert not bs.gemm(a, b, FP32, out=c.clone().requires_grad_(), bias=bias).grad_fn

    def step(a, b, c):
        bs.gemm(a, b, out=c, accumulate=True)
        return bs.gemm(a, b) * 2

    torch.compiler.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine, theirs = c.clone(), c.clone()
    assert torch.equal(run(a, b, mine), step(a, b, theirs))
    assert torch.equal(mine, theirs)
    assert len(machine.launched) == 7


def test_padded_contraction(machine):
    a, b = machine.operands(matrix(9, 130), matrix(16, 130, seed=1), pad=True)
    machine.check(bs.gemm(a, b, FP32), product(a, b))
    assert len(machine.launched) == 1


def test_not_numbers(machine):
    """NaN and infinity, in values and in scales, go where the reference has them."""
    x, w = matrix(34, 256), matrix(136, 256, seed=1)
    x[3, 7], x[5, 200], x[9] = torch.nan, torch.inf, 0.0
    w[130, 5] = torch.nan
    a, b = machine.operands(x, w)
    got, want = bs.gemm(a, b, FP32), bs.gemm(a, b, FP32, backend="reference")
    assert len(machine.launched) == 1
    assert torch.equal(got.isfinite(), want.isfinite())
    assert not bool(got[9, :128].any())
    finite = want.isfinite()
    assert bool((got - want)[finite].norm() <= machine.sums * want[finite].norm())


def test_empty(machine):
    """No rows, no columns, and a sum of nothing, which is the bias."""
    a, b = (bs.quantize(matrix(32, 128, seed=seed), "mxfp8") for seed in (0, 1))
    bias = matrix(32, seed=2)
    assert bs.gemm(a[:0], b.mT, backend="kernel").shape == (0, 32)
    assert bs.gemm(a, b[:0].mT, backend="kernel").shape == (32, 0)
    nothing = bs.gemm(a[:, :0], b[:, :0].mT, bias=bias, backend="kernel")
    assert torch.equal(nothing, bias.expand(32, 32))
    assert not machine.launched


def test_a_global_scale_of_one_dimension(machine):
    a, b = (bs.quantize(matrix(32, 64, seed=seed), "nvfp4") for seed in (0, 1))
    c = bs.ScaledTensor(
        a.qdata, a.qscale, format="nvfp4", shape=a.shape, global_scale=a.global_scale[None]
    )
    for _ in range(2):
        assert torch.equal(bs.gemm(c, b.mT, backend="kernel"), bs.gemm(a, b.mT, backend="kernel"))


@pytest.mark.parametrize(
    ("capability", "found"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), None)],
)
def test_the_kernels_of_a_device(monkeypatch, capability, found):
    major, minor = capability
    fields = {"major": major, "minor": minor, "multi_processor_count": 100}
    monkeypatch.setattr(runtime, "_gpus", {})
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**fields)
    )
    asked = driver.CUdevice_attribute
    memory = {  # of an H100
        asked.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 2_619_000,
        asked.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 5120,
    }
    monkeypatch.setattr(driver, "cuInit", lambda flags: (0,))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (0, index))
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda what, device: (0, memory[what]))
    of_gpu = products_on(torch.device("cuda", 0))
    gpu = runtime.gpu_of(torch.device("cuda", 0))
    assert gpu.multiprocessors == 100
    assert gpu.dram_rate == pytest.approx(3352.32)
    if found:
        assert of_gpu is {"sm_90a": gemm_sm90}.get(found, gemm_sm100).PRODUCTS
    else:
        assert re.search("sm_120.*sm_90a, sm_100a and sm_103a", of_gpu)
    assert "the operands are on cpu" in products_on(torch.device("cpu"))


def test_a_driver_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(driver, "cuInit", lambda flags: (0,))
    monkeypatch.setattr(
        driver, "cuDeviceGet", lambda index: (driver.CUresult.CUDA_ERROR_INVALID_DEVICE, 0)
    )
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE of device 3"):
        dram_rate(3)


def test_doctor(machine, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    name, why = backends.backend("gemm", "cuda")
    assert name == "CuTe DSL"
    assert machine.left[0] in why
    monkeypatch.setattr(backends, "products_on", lambda device: "no reason")
    assert backends.backend("gemm", "cuda") == ("reference", "no reason")
