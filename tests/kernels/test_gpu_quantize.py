"""The GPU quantizers, run in the emulator: their bytes are the reference's."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, check, emulated, nasty

from blockscale.formats import formats
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers.calls import Request
from stand_in import chip

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = (-1, -2)

# format, axes, layout, dtype and what differs from the defaults: each is another kernel.
CASES: list[tuple[str, tuple[int, ...], str, torch.dtype, dict[str, Any]]] = [
    ("mxfp8", BOTH, "tcgen05", BF16, {}),
    ("mxfp8", BOTH, "compact", FP16, {"nonfinite": "te"}),
    ("mxfp8", (-1,), "compact", FP32, {"scale_rounding": "floor"}),
    ("mxfp8_e5m2", (-2,), "packed", FP32, {"nonfinite": "te"}),
    ("mxfp8_e5m2", (-1,), "packed", BF16, {"scale_rounding": "even"}),
    ("mxfp4", (-1,), "tcgen05", BF16, {"nonfinite": "te"}),
    ("mxfp4", (-1,), "compact", FP16, {"scale_rounding": "ceil"}),
    ("nvfp4", (-1,), "tcgen05", BF16, {"global_scale": 0.37}),
    ("nvfp4", (-1,), "compact", FP32, {"global_scale": 1e-4, "nonfinite": "te"}),
    ("fp8_1x128", (-1,), "sm90", BF16, {}),
    ("fp8_1x128", BOTH, "compact", FP32, {"nonfinite": "te"}),
    ("fp8_1x128", (-2,), "sm90", FP16, {"scale_rounding": "rceil"}),
    ("fp8_128x128", BOTH, "compact", BF16, {}),
]


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    scale = given.get("global_scale")
    return given if scale is None else given | {"global_scale": torch.tensor(scale)}


def _cases() -> list[Any]:
    """Every case for one architecture; those whose instructions differ, for both."""
    found = []
    for i, case in enumerate(CASES):
        both = i == 0 or case[0] in ("mxfp4", "nvfp4")
        for arch in ARCHITECTURES if both else ARCHITECTURES[i % 2 :][:1]:
            name = "-".join(map(str, (arch, *case[:4])))
            found.append(pytest.param(arch, *case, id=name.replace(" ", "")))
    return found


@pytest.mark.parametrize(("arch", "format", "axes", "layout", "dtype", "given"), _cases())
def test_formats(arch, format, axes, layout, dtype, given):
    x = nasty(40, 160, dtype)
    check(x, format, arch, axes, layout=layout, **_arguments(given))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("shape", "completion"),
    [
        ((1, 32), "late"),
        ((129, 96), "eager"),
        ((128, 128), "random"),
        ((33, 272), "late"),
        ((300, 16), "random"),
    ],
)
def test_shapes(shape, completion, arch):
    """Tails and padding; memory is filled with other bytes before."""
    x = nasty(*shape, BF16, seed=sum(shape))
    check(x, "mxfp8", arch, BOTH, layout="tcgen05", completion=completion)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_bf16(arch):
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    x = patterns.view(BF16).view(512, 128)
    # next to each other, and far apart: sorted blocks are all special or all not
    for each in (x, x.view(128, 512).mT.contiguous()):
        check(each, "mxfp8", arch, BOTH, layout="tcgen05")


@pytest.mark.parametrize("axes", [(-1,), BOTH])
@pytest.mark.parametrize("times", [1.0, 2.0**20])
def test_ties_of_e2m1(times, axes):
    """Halfway between two E2M1 values, and next to it; where the scale is 1, and where it is as
    large as can be, and values are too large for it."""
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above, below = (torch.nextafter(between, torch.tensor(end)) for end in (9.0, 0.0))
    values = torch.cat([between, above, below, torch.tensor([0.0, 6.0])])
    x = torch.stack([values.roll(i)[:16] * sign for i in range(23) for sign in (1, -1)])
    x[:, 0] = 6.0
    x = torch.cat([x, x.flip(0)]).repeat(1, 2)[:64].contiguous() * times
    check(x, "nvfp4", "sm_90a", axes, layout="tcgen05", global_scale=torch.tensor(1.0))
    check(
        x.mT.contiguous(), "nvfp4", "sm_90a", axes, layout="tcgen05", global_scale=torch.tensor(1.0)
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("format", "axes", "layout"),
    [
        ("mxfp8", BOTH, "tcgen05"),
        ("mxfp8", (-1,), "compact"),
        ("nvfp4", (-1,), "tcgen05"),
        ("fp8_1x128", (-1,), "sm90"),
    ],
)
def test_sectors(format, axes, layout, arch):
    """No sector of global memory is moved in part, and none twice."""
    rows, columns = 128, 1024
    given = {"global_scale": torch.tensor(1.0)} if format == "nvfp4" else {}
    x = nasty(rows, columns, BF16)
    (report,) = check(x, format, arch, axes, layout=layout, profile=True, **given)
    write, read = report.global_memory("write"), report.global_memory("read")
    fmt = formats[format]
    each = fmt.element.bits / 8 + fmt.scale.nbytes / fmt.block_size
    assert write.asked == 32 * write.sectors == len(axes) * int(each * rows * columns)
    scalars = 32 * 64 if fmt.has_global_scale else 0  # a sector, read by every warp
    assert 2 * rows * columns <= 32 * read.sectors <= 2 * rows * columns + scalars


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("format", "axes", "layout"),
    [
        ("mxfp8", (-1,), "tcgen05"),
        ("mxfp8", (-1,), "compact"),
        ("mxfp8", BOTH, "tcgen05"),
        ("nvfp4", (-1,), "tcgen05"),
        ("fp8_1x128", (-1,), "sm90"),
        ("fp8_1x128", BOTH, "sm90"),
    ],
)
def test_small(format, axes, layout, arch):
    """Tensors that do not fill a GPU, whose tiles take more warps."""
    given = {"global_scale": torch.tensor(0.37)} if format == "nvfp4" else {}
    x = nasty(130, 272, BF16)
    check(x, format, arch, axes, layout=layout, multiprocessors=132, **given)


def test_strided_misaligned_and_odd():
    whole = nasty(40, 400, BF16)
    check(whole[::2, 8:136], "mxfp8", "sm_90a")  # strides that TMA takes
    check(whole[:, 1:65], "mxfp8", "sm_90a")  # an address that it does not
    check(whole[:, :37].contiguous(), "mxfp8", "sm_100a", BOTH, layout="packed")  # nor such rows


def test_shapes_of_rows():
    x = nasty(6, 64, BF16)
    check(x.view(2, 3, 64), "mxfp8", "sm_90a")
    check(x[0], "mxfp8", "sm_90a")


def test_batches_of_blocks():
    """A batch is one matrix to a kernel, as long as no block of rows reaches from one of its
    matrices into the next."""
    check(nasty(256, 128, BF16).view(2, 128, 128), "fp8_128x128", "sm_90a")


def test_same_bytes_again():
    x = nasty(128, 128, BF16)
    first, second = (emulated(x, "mxfp8", "sm_90a", completion="random")[0] for _ in range(2))
    assert torch.equal(first[0][0].view(torch.uint8), second[0][0].view(torch.uint8))


@pytest.mark.parametrize(
    ("x", "format", "axes", "layout", "arch", "message"),
    [
        (torch.zeros(2, 64), "mxfp8", (-1,), "compact", "sm_80", "sm_90a, sm_100a and sm_103a"),
        (torch.zeros(2, 64), "mxfp8", (-1,), "compact", None, "x is on cpu"),
        (torch.zeros(2, 64).double(), "mxfp8", (-1,), "compact", "sm_90a", "float64"),
        (torch.zeros(2, 64), "mxfp6_e2m3", (-1,), "compact", "sm_90a", "6-bit"),
        (torch.zeros(2, 64), "mxfp8", (-1,), "sm90", "sm_90a", "does not hold scales of mxfp8"),
        (torch.zeros(2, 64), "fp8_128x128", (-1,), "sm90", "sm_90a", "write compact scales"),
        (torch.zeros(2, 3, 64), "mxfp8", (-1,), "tcgen05", "sm_90a", "matrices"),
        (torch.zeros(64), "mxfp8", (-2,), "compact", "sm_90a", "need a matrix"),
        (torch.zeros(2, 64), "nvfp4", (-1,), "compact", "sm_90a", "needs one"),
        (torch.zeros(64, 2).mT, "mxfp8", (-1,), "compact", "sm_90a", "not contiguous"),
    ],
)
def test_refusals(x, format, axes, layout, arch, message):
    asked = Request(format, axes, (layout,) * len(axes))
    with pytest.raises(ValueError, match=message):
        quantizers.quantize(x, asked, gpu=arch and chip(arch))


@pytest.mark.parametrize(
    ("format", "axes", "layout", "message"),
    [
        ("fp8_128x128", (-2,), "compact", "cut its blocks"),
        ("fp8_128x128", BOTH, "compact", "cut its blocks"),
    ],
)
def test_refusals_of_groups(format, axes, layout, message):
    ends, layouts = torch.tensor([3, 64], dtype=torch.int32), (layout,) * len(axes)
    x, asked = torch.zeros(64, 64), Request(format, axes, layouts, grouped=True)
    assert message in quantizers.unsupported(x, asked, chip("sm_90a"))
    with pytest.raises(ValueError, match=message):
        quantizers.quantize(x, asked, offsets=ends, gpu=chip("sm_90a"))


def test_offsets_make_groups():
    """Whatever the request says of them: else rows of all experts would share blocks."""
    ends, x = torch.tensor([3, 64], dtype=torch.int32), torch.zeros(64, 64)
    asked = Request("fp8_128x128", (-2,), ("compact",))
    with pytest.raises(ValueError, match="cut its blocks"):
        quantizers.quantize(x, asked, offsets=ends, gpu=chip("sm_90a"))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("axes", "k_major"), [((-1,), False), ((-2,), False), ((-2,), True)])
def test_lanes_read_from_all_banks(axes, k_major, dtype):
    """Sixteen elements of a lane start where its neighbours' do: lanes read them in other orders.

    Without these, fp32 inputs waited for the banks of shared memory, not for global memory.
    """
    given = {"layouts": ("compact",), "k_major": k_major, "profile": True}
    _, (report,) = emulated(nasty(128, 128, dtype), "mxfp8", "sm_90a", axes, **given)
    assert sum(bank.wavefronts for bank in report.banks if bank.kind == "read")
    assert not sum(bank.conflicts for bank in report.banks)
