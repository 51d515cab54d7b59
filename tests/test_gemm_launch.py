"""Products that are launched by a look-up. Kernels are stubs, and CPU tensors count as a GPU's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import blockscale as bs
from blockscale import gemm_launch, ops
from blockscale.ops import gemm_kernels
from stand_in import gpu

BF16 = torch.bfloat16
M, N, K = 40, 48, 256


class Pair(NamedTuple):
    """Of an architecture: formats of both sides, None a plain bf16 matrix, layouts of scales that
    its kernels read as they are, and rows of A."""

    arch: str
    left: str | None
    right: str
    layouts: tuple[str, str] = ("compact", "compact")
    rows: int = M


TILES = ("tcgen05", "tcgen05")
PAIRS = [
    Pair("sm_90a", "fp8_1x128", "fp8_128x128", ("sm90", "compact")),
    Pair("sm_90a", "fp8_1x128", "fp8_1x128", ("sm90", "sm90")),
    Pair("sm_90a", "mxfp8", "mxfp4"),
    Pair("sm_90a", "nvfp4", "nvfp4"),
    Pair("sm_90a", None, "mxfp8"),
    Pair("sm_90a", "mxfp8_e5m2", "mxfp8", rows=200),
    Pair("sm_90a", "nvfp4", "nvfp4", rows=200),
    Pair("sm_90a", None, "nvfp4", rows=200),
    Pair("sm_100a", "mxfp8", "mxfp8_e5m2", TILES),
    Pair("sm_100a", "mxfp4", "mxfp8", TILES),
    Pair("sm_103a", "nvfp4", "nvfp4", TILES),
]
MACHINES = {"sm_90a": PAIRS[0], "sm_100a": PAIRS[8]}
GLOBAL = [pair for pair in PAIRS if pair.left == "nvfp4"]  # formats with global scales


class Calls:
    """What reached the kernel, and how many products passed all checks before."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []
        self.widened: dict[int, tuple] = {}
        self.checked = 0

    def kernel(self, *args) -> None:
        """A product's, or one that widens A or B for it: what that one was given counts."""
        if len(args) in (3, 4):
            data, scale, values, *_ = args
            self.widened[id(values)] = data, scale
            return
        if getattr(args[1], "dtype", None) == BF16:  # matrices without scales
            args = (args[0], None, args[1], None, *args[2:])
        elif args[2] is None or args[2].dtype == torch.int32:  # room for sums of shared tiles
            args = (*args[:2], *args[3:])
        a, b = (self.widened.pop(id(args[i]), args[i : i + 2]) for i in (0, 2))
        self.launched.append((*a, *b, *args[4:]))


@pytest.fixture(params=MACHINES)
def pair(request):
    return MACHINES[request.param]


@pytest.fixture(autouse=True)
def calls(monkeypatch, pair):
    found = Calls()
    for name in ("gemm", "gemm_out"):
        monkeypatch.setattr(ops, name, counted(found, getattr(ops, name)))
    with gpu(pair.arch, lambda config: found.kernel):
        yield found


def counted(found, op):
    def call(*args):
        found.checked += 1
        return op(*args)

    return call


def matrix(rows, seed=0):
    return torch.randn((rows, K), generator=torch.Generator().manual_seed(seed)).to(BF16)


def quantized(rows, name, layout="compact", seed=0):
    x = matrix(rows, seed)
    return x if name is None else bs.quantize(x, name, layout=layout, backend="reference")


def operands(pair, seed=0):
    """``a`` and a weight; the product is ``a @ weight.mT``."""
    a = quantized(pair.rows, pair.left, pair.layouts[0], seed)
    return a, quantized(N, pair.right, pair.layouts[1], seed + 1)


def starts(*tensors):
    return [None if x is None else x.data_ptr() for x in tensors]


def parts(q):
    return (q.qdata, q.qscale) if isinstance(q, bs.ScaledTensor) else (q, None)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_calls_alike_are_launched_with_their_own_operands(calls, pair):
    for seed in range(3):
        a, w = operands(pair, 2 * seed)
        for _ in range(2):
            y = bs.gemm(a, w.mT)
            assert (y.shape, y.dtype) == ((pair.rows, N), BF16)
            *args, bias, alpha = calls.launched[-1][:7]
            assert starts(*args) in (
                starts(*parts(a), *parts(w), y),
                starts(*parts(w), *parts(a), y),  # for kernels that take the wide side first
            )
            assert {args[0].shape[0], args[2].shape[0]} == {pair.rows, N}
            assert {args[0].dtype, args[2].dtype} <= {torch.uint8, BF16}
            assert bias is None
            scalars = [getattr(x, "global_scale", None) for x in (a, w)]
            known = starts(*(x for x in scalars if x is not None))
            assert starts(*(alpha if isinstance(alpha, tuple) else [alpha])) == (known or [None])
    assert calls.checked == 1


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.left], ids=str)
def test_data_that_starts_elsewhere(calls, pair):
    """Launched where TMA can load it: 4-bit elements of Blackwell, that it spreads, at multiples of
    32 bytes. Else checked anew."""
    a, w = operands(pair)
    bs.gemm(a, w.mT)
    spread = pair.arch != "sm_90a" and a.format.element.bits < 8
    memory = torch.zeros(a.qdata.nbytes + 64, dtype=torch.uint8)
    assert memory.data_ptr() % 32 == 0
    for start, launched in ((0, True), (32, True), (16, not spread), (8, False)):
        moved = a.detach()
        moved.qdata = memory[start:][: a.qdata.nbytes].view(a.qdata.dtype).view(a.qdata.shape)
        before = calls.checked
        bs.gemm(moved, w.mT)
        assert calls.checked == before + (not launched)
        if launched:
            assert moved.qdata.data_ptr() in starts(*calls.launched[-1][:4])


@pytest.mark.parametrize("pair", GLOBAL, ids=str)
def test_parts_that_were_replaced(calls, pair):
    a, w = operands(pair)
    b = w.mT
    bs.gemm(a, b)
    a.global_scale = torch.tensor(2.0)
    w.global_scale = torch.tensor(3.0)
    bs.gemm(a, w.mT)
    assert [x.item() for x in calls.launched[-1][6]] == [2, 3]
    a.qdata, a.qscale = a.qdata.clone(), a.qscale.clone()
    bs.gemm(a, w.mT)
    left = calls.launched[-1]
    assert set(starts(*parts(a))) < set(starts(*left[:4]))
    other = copy.deepcopy(a)
    bs.gemm(other, w.mT)
    assert set(starts(*parts(other))) < set(starts(*calls.launched[-1][:4]))
    assert not set(starts(*parts(other))) & set(starts(*parts(a)))
    assert calls.checked == 1


def test_other_arguments_are_checked_anew(calls, pair):
    a, w = operands(pair)
    bias, out = torch.zeros(N), torch.zeros(M, N)
    kinds = [
        {},
        {"out_dtype": torch.float16},
        {"bias": bias},
        {"bias": bias.to(BF16)},
        {"out": out},
        {"out": out, "accumulate": True},
        {"out": torch.zeros(M, N + 4)[:, :N]},
        {"out": out, "bias": bias, "accumulate": True},
    ]
    for i, given in enumerate(kinds):
        for _ in range(2):
            y = bs.gemm(a, w.mT, **given)
            assert y is given.get("out", y)
            assert calls.launched[-1][5] is given.get("bias")
            assert calls.checked == i + 1


def test_out_of_a_remembered_call(calls, pair):
    a, w = operands(pair)
    memory = torch.zeros(4 * M * N)
    for part, name in ((a.qdata, "a"), (a.qscale, "a"), (w.qdata, "b"), (w.qscale, "b")):
        assert part.untyped_storage().nbytes() <= memory.nbytes
        inside = memory.view(torch.uint8)[: part.nbytes].view(part.dtype).view(part.shape)
        inside.copy_(part)
        q, other = (a, w) if name == "a" else (w, a)
        again = bs.ScaledTensor(
            *(inside if each is part else each for each in parts(q)),
            format=q.format,
            shape=q.shape,
            layout=q.scale_layout,
        )
        pair = (again, other.mT) if name == "a" else (other, again.mT)
        apart = memory[2 * M * N : 3 * M * N].view(M, N)
        version = apart._version
        for _ in range(2):
            assert bs.gemm(*pair, out=apart) is apart
        assert apart._version >= version + 2
        count = len(calls.launched)
        with pytest.raises(ValueError, match=f"out: shares memory with {name};"):
            bs.gemm(*pair, out=memory[: M * N].view(M, N))
        assert len(calls.launched) == count
    assert calls.checked == 1
    with torch.inference_mode():
        bs.gemm(a, w.mT, out=torch.zeros(M, N))  # it has no version
    assert calls.checked == 1


class SeenFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeenOps(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func.name().startswith("blockscale::gemm")
        return func(*args, **(kwargs or {}))


def test_calls_that_somebody_looks_at(calls, pair):
    a, w = operands(pair)
    b, bias = w.mT, torch.zeros(N, requires_grad=True)
    for _ in range(2):
        bs.gemm(a, b)
        with torch.no_grad():
            bs.gemm(a, b, bias=bias)
    assert calls.checked == 2
    with SeenOps() as mode:
        bs.gemm(a, b)
    assert (mode.seen, calls.checked) == (1, 3)
    with SeenFunctions():
        bs.gemm(a, b)
    assert calls.checked == 4
    assert bs.gemm(a, b, bias=bias).requires_grad
    assert calls.checked == 5
    askew = torch.zeros(M * N + 1, dtype=BF16)[1:].view(M, N)
    bs.gemm(a, b, out=askew)
    bs.gemm(a, b, backend="reference")
    assert calls.checked == 7


@pytest.mark.parametrize("pair", [PAIRS[0]], ids=str)
@pytest.mark.parametrize(("name", "layout"), [("fp8_128x128", "sm90"), ("fp8_1x128", "compact")])
def test_scales_that_lie_alike_and_mean_something_else(calls, pair, name, layout):
    """As many as those of 4 x 512 elements by rows in layout "sm90": one for all rows; or the
    transposed ones. They are rewritten in every call."""
    x, w = torch.cat([matrix(4), matrix(4, seed=1)], 1), torch.cat([matrix(N), matrix(N)], 1)
    a = bs.quantize(x, name, layout=layout)
    by_rows = a.compact_scale().expand(4, -1).mT
    b = bs.quantize(w, "fp8_128x128").mT
    for _ in range(2):
        bs.gemm(a, b)
        assert torch.equal(calls.launched[-1][1], by_rows)
    assert calls.checked == 2


@pytest.mark.parametrize("pair", PAIRS[3:4], ids=str)
def test_what_has_to_be_copied_is_found_once(calls, pair, monkeypatch):
    """Operands that no kernel takes as they are: a call like one before is not prepared twice."""
    products = gemm_kernels.products_on(torch.device("cpu"))
    laid = []

    def lay(a, b):
        laid.append(1)
        return products.lay(a, b)

    found = replace(products, lay=lay)
    for module in (gemm_kernels, gemm_launch):
        monkeypatch.setattr(module, "products_on", lambda device: found)
    x = torch.randn(pair.rows, K + 16, generator=torch.Generator().manual_seed(0)).to(BF16)
    a = bs.quantize(x, pair.left, backend="reference")  # rows of 136 bytes
    b = bs.quantize(x[:16], pair.right, backend="reference").mT
    for calls_before in (2, 1, 1):
        laid.clear()
        bs.gemm(a, b)
        assert len(laid) == calls_before
