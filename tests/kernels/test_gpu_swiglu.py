"""SwiGLU and its backward, quantized by one GPU kernel, in the emulator: the reference's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, check, nasty, poisoned, produced

from blockscale import emulator as em
from blockscale import reference
from blockscale.formats import formats
from blockscale.kernels.quantizers import calls as quantizers
from stand_in import chip

COMPLETIONS = ("late", "eager", "random")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
FORWARD, BACKWARD = "swiglu", "swiglu_backward"
GLOBAL = {"global_scale": torch.tensor(0.037)}


def inputs(producer: str, rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Any:
    """``x`` (rows, 2 * width) and what else the producer takes. Gates have any size in some
    columns, in the others one where exp(-|g|) counts.
    """
    generator = torch.Generator().manual_seed(seed)
    x = nasty(rows, 2 * width, dtype, seed)
    usual = 12 * torch.randn(rows, -(-width // 3), generator=generator)
    x[:, :width:3] = usual.to(dtype)
    grad = nasty(rows, width, dtype, seed + 1)
    return x, {"producer": producer, "others": (grad,) if producer == BACKWARD else ()}


# producer, format, axes, layouts, dtype and what differs from the defaults: each another kernel
CASES: list[tuple[str, str, tuple[int, ...], Any, torch.dtype, dict[str, Any]]] = [
    (FORWARD, "mxfp8", BOTH, "tcgen05", BF16, {}),
    (FORWARD, "mxfp8", COLUMNS, "compact", FP32, {"nonfinite": "te"}),
    (FORWARD, "nvfp4", ROWS, "tcgen05", FP16, GLOBAL),
    (FORWARD, "mxfp4", COLUMNS, "packed", BF16, {"nonfinite": "te"}),
    (FORWARD, "fp8_1x128", BOTH, ("sm90", "compact"), FP16, {"nonfinite": "te"}),
    (BACKWARD, "nvfp4", COLUMNS, "tcgen05", FP32, {"nonfinite": "te"} | GLOBAL),
    (BACKWARD, "mxfp8", BOTH, "tcgen05", BF16, {}),
    (BACKWARD, "fp8_128x128", BOTH, "compact", BF16, {"nonfinite": "te"}),
    (BACKWARD, "mxfp4", ROWS, "compact", FP16, {}),
    (BACKWARD, "fp8_1x128", BOTH, ("sm90", "compact"), FP32, {}),
    (BACKWARD, "fp8_1x128", BOTH, "sm90", BF16, {"k_major": True}),
    (FORWARD, "fp8_1x128", BOTH, "sm90", FP16, {"k_major": True, "nonfinite": "te"}),
]


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:5])) for c in CASES])
def test_formats(i):
    producer, format, axes, layout, dtype, given = CASES[i]
    x, made = inputs(producer, 40, 112 if producer == FORWARD else 128, dtype, seed=i)
    given = given | made | {"layout": layout, "completion": COMPLETIONS[i % 3]}
    check(x, format, ARCHITECTURES[i % 2], axes, **given)


@pytest.mark.parametrize(
    ("producer", "rows", "width", "completion"),
    [
        (FORWARD, 1, 16, "eager"),
        (FORWARD, 129, 144, "random"),
        (BACKWARD, 1, 128, "random"),
        (BACKWARD, 129, 256, "late"),
    ],
)
def test_shapes(producer, rows, width, completion):
    """Tails and padding; memory is filled with other bytes before."""
    x, made = inputs(producer, rows, width, BF16, seed=rows)
    check(x, "mxfp8", "sm_90a", BOTH, layout="tcgen05", completion=completion, **made)


@pytest.mark.parametrize("format", ["fp8_128x128", "fp8_1x128", "mxfp8"])
@pytest.mark.parametrize("producer", ["load", FORWARD, BACKWARD])
def test_each_column_may_have_the_largest(producer, format):
    """Of a block: columns of any size, and no NaN that would be it anyway."""
    generator = torch.Generator().manual_seed(len(format))
    sizes = torch.logspace(-3, 3, 256)[torch.randperm(256, generator=generator)]
    x = (torch.randn(130, 256, generator=generator) * sizes).to(BF16)
    grad = (torch.randn(130, 128, generator=generator) * sizes[::2]).to(BF16)
    made = {"producer": producer, "others": (grad,) if producer == BACKWARD else ()}
    for arch, completion in zip(ARCHITECTURES, ("late", "random"), strict=True):
        check(x, format, arch, BOTH, completion=completion, **made)


@pytest.mark.parametrize(("format", "width"), [("mxfp8", 384), ("mxfp8", 640), ("nvfp4", 640)])
def test_a_tile_has_columns_of_one_part(format, width):
    """Gradients of the gate end where those of ``up`` begin, in the middle of a wide tile."""
    x, made = inputs(BACKWARD, 70, width, BF16)
    given = made | (GLOBAL if format == "nvfp4" else {})
    for arch, completion in zip(ARCHITECTURES, ("eager", "random"), strict=True):
        check(x, format, arch, ROWS, completion=completion, **given)


@pytest.mark.parametrize(("producer", "arch"), [(FORWARD, "sm_100a"), (BACKWARD, "sm_90a")])
def test_groups(producer, arch):
    """With empty groups, one of two tiles, and a tail."""
    x, made = inputs(producer, 200, 128, BF16)
    offsets = torch.tensor([0, 33, 33, 190], dtype=torch.int32)
    check(x, "mxfp8", arch, BOTH, layout=("tcgen05", "compact"), offsets=offsets, **made)


def weighted(producer: str, rows: int, width: int, dtype: torch.dtype) -> Any:
    """``inputs`` with weights, one of them NaN, and room for partial sums of their gradients."""
    x, made = inputs(producer, rows, width, dtype)
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(rows))
    weights[rows // 2] = torch.nan
    sums = torch.full((-(-width // 64), rows), torch.nan)
    others = (*made["others"], weights, sums)[: 3 if producer == BACKWARD else 1]
    return x, {"producer": f"weighted_{producer}", "others": others}


@pytest.mark.parametrize(
    ("producer", "format", "axes", "layout", "dtype", "given"),
    [
        (FORWARD, "fp8_1x128", COLUMNS, "sm90", BF16, {"k_major": True}),
        (FORWARD, "nvfp4", COLUMNS, "tcgen05", BF16, GLOBAL),
        (FORWARD, "mxfp8", ROWS, "compact", FP32, {}),
        (BACKWARD, "fp8_1x128", BOTH, "sm90", BF16, {"k_major": True}),
        (BACKWARD, "mxfp8", BOTH, ("tcgen05", "compact"), BF16, {"k_major": True}),
        (BACKWARD, "nvfp4", BOTH, "tcgen05", BF16, GLOBAL),
        (BACKWARD, "mxfp8", ROWS, "compact", FP32, {}),
        (BACKWARD, "mxfp8", COLUMNS, "compact", FP16, {"nonfinite": "te"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_of_rows(producer, format, axes, layout, dtype, given, arch):
    """Of experts' rows, two tiles and a tail; the weights' gradients to the bit."""
    x, made = weighted(producer, 140, 128, dtype)
    given = given | {"offsets": torch.tensor([33, 33, 135], dtype=torch.int32)}
    if axes == ROWS:
        del given["offsets"]
    check(x, format, arch, axes, layout=layout, completion="random", **given, **made)
    if producer == BACKWARD:
        grad, weights, sums = made["others"]
        want = reference.weighted_swiglu_backward(grad, x, weights)[1]
        got = reference.combine(sums, torch.arange(len(sums))[None])[0]
        number = ~want.isnan()
        assert number.any()
        assert got[~number].isnan().all()
        assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))


@pytest.mark.parametrize(
    ("format", "axes", "layout", "width", "dtype", "given"),
    [
        ("mxfp8", BOTH, "tcgen05", 77, BF16, {"nonfinite": "te"}),
        ("fp8_1x128", ROWS, "sm90", 32, BF16, {}),
        ("nvfp4", ROWS, "tcgen05", 130, FP32, GLOBAL),
    ],
    ids=str,
)
def test_padding_has_no_weight(format, axes, layout, width, dtype, given):
    """Zeros times a negative weight, or one that is not finite, would be none."""
    x, made = weighted(FORWARD, 40, width, dtype)
    (weights,) = made["others"]
    weights[:3] = torch.tensor([-1.0, float("inf"), -0.0])
    check(x, format, "sm_90a", axes, layout=layout, **given, **made)


@pytest.mark.parametrize("producer", [FORWARD, BACKWARD])
def test_global_scale_of_weighted_rows(producer):
    x, made = weighted(producer, 40, 128, BF16)
    made["others"][-1 if producer == FORWARD else 1][20] = 0.5
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores,global")), poisoned():
        got = quantizers.global_scale(x, formats["nvfp4"], gpu=chip("sm_90a", 132), **made)
    values = produced(x, made["producer"], made["others"])
    assert torch.equal(got, reference.global_scale(values, formats["nvfp4"]))


def test_strided_misaligned_and_odd():
    whole, grad = nasty(40, 400, BF16), nasty(40, 400, BF16, seed=1)
    given = {"producer": FORWARD, "layout": "tcgen05"}
    check(whole[::2, 8:232], "mxfp8", "sm_90a", BOTH, **given)  # strides that TMA takes
    for x in (
        whole[:, 1:161],  # an address that it does not
        whole[:, :200],  # halves whose second is misaligned
        whole[:, :74].contiguous(),  # an odd number of columns
    ):
        check(x, "mxfp8", "sm_90a", **given)
    given = {"producer": BACKWARD, "layout": "tcgen05"}
    others = (grad[:20, 8:136],)  # at another distance than those of x
    check(whole[::2, 8:264], "mxfp8", "sm_90a", BOTH, others=others, **given)


# --- values ---------------------------------------------------------------------------------------


def _special(dtype: torch.dtype) -> Tensor:
    """Where the sigmoid's steps change, and the ends of what ``dtype`` holds; both signs."""
    info = torch.finfo(dtype)
    some = [0.25, 0.5, 1.0, 1.2785, 17.33, 87.0, 87.3365, 87.34, 88.0, 88.0297, 88.04, 89.0, 104.0]
    some += [0.0, float("inf"), float("nan"), info.max, info.tiny, info.tiny * info.eps, 1e4]
    values = torch.tensor(some)
    return torch.cat((values, -values)).to(dtype)


@pytest.mark.parametrize("policy", ["propagate", "te"])
@pytest.mark.parametrize("producer", [FORWARD, BACKWARD])
def test_every_value_alone(producer, policy):
    """A block has one product that is not zero or NaN: its fp32 scale tells all bits but the last.

    Special gates meet ups and gradients of all kinds, usual ones only 1.
    """
    special = _special(FP32)
    ups = torch.tensor([0.0, 1e30, -float("inf"), float("nan"), -1e-30, -3.0])
    gates, ups = (each.flatten() for each in torch.meshgrid(special, ups, indexing="ij"))
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(512 - len(gates), generator=generator) * 6
    gates, ups = torch.cat((gates, usual)), torch.cat((ups, torch.ones_like(usual)))
    grads = special[torch.randint(len(special), gates.shape, generator=generator)]
    grads[-len(usual) :] = 1.0
    place = torch.randint(128, (len(gates), 1), generator=generator)

    def spread(values: Tensor) -> Tensor:
        blocks = torch.zeros(len(values), 128).scatter_(1, place, values.unsqueeze(1))
        return blocks.view(128, 4 * 128)

    x = torch.cat((spread(gates), spread(ups)), -1)
    given = {"producer": producer, "nonfinite": policy}
    given["others"] = (spread(grads),) if producer == BACKWARD else ()
    check(x, "fp8_1x128", "sm_90a", **given)


@pytest.mark.parametrize("producer", [FORWARD, BACKWARD])
def test_gates_of_every_size(producer):
    """An eighth of all patterns; negative ones lie in blocks of their own."""
    patterns = torch.arange(0, 1 << 16, 8).to(torch.int32).to(torch.int16)
    gates = patterns.view(BF16).view(64, 128)
    x = torch.cat((gates, torch.full_like(gates, 1.5)), -1)
    others = (torch.full_like(gates, -3.0),) if producer == BACKWARD else ()
    check(x, "mxfp8", "sm_90a", BOTH, layout="tcgen05", producer=producer, others=others)


# --- what moves, and refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("producer", [FORWARD, BACKWARD])
def test_sectors(producer):
    """No sector of global memory is moved in part, and none twice."""
    rows, width = 128, 256
    x, made = inputs(producer, rows, width, BF16)
    (report,) = check(x, "mxfp8", "sm_90a", BOTH, layout="tcgen05", profile=True, **made)
    write, read = report.global_memory("write"), report.global_memory("read")
    values = rows * width * (2 if producer == BACKWARD else 1)
    assert write.asked == 32 * write.sectors == 2 * (values + values // 32)
    taken = x.numel() + sum(other.numel() for other in made["others"])
    assert read.asked == 32 * read.sectors == 2 * taken


X, GRAD = torch.zeros(4, 256), torch.zeros(4, 128)


@pytest.mark.parametrize(
    ("x", "others", "message"),
    [
        (torch.zeros(4, 192), (torch.zeros(4, 96),), "no multiple of 128"),
        (X, (GRAD.half(),), "x has torch.float32, another input torch.float16; cast one"),
        (X, (torch.zeros(128, 4).mT,), "not contiguous"),
        (X.view(2, 2, 256), (GRAD,), "matrices"),
    ],
)
def test_refusals(x, others, message):
    asked = quantizers.Request("mxfp8", producer=BACKWARD)
    with pytest.raises(ValueError, match=message):
        quantizers.quantize(x, asked, others=others, gpu=chip("sm_90a"))


def test_unsupported():
    forward, backward = (quantizers.Request("mxfp8", producer=each) for each in (FORWARD, BACKWARD))
    odd, gpu = torch.zeros(4, 192), chip("sm_90a")
    assert quantizers.unsupported(odd, forward, gpu) == ""
    assert quantizers.unsupported(X, backward, gpu) == ""
    reason = quantizers.unsupported(odd, backward, gpu)
    assert "half of its columns are no multiple of 128" in reason
