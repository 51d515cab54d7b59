"""4-bit formats along columns, by the GPU quantizers in the emulator: the reference's bytes."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, check, emulated, expected, nasty

from blockscale import reference
from blockscale.formats import formats

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COLUMNS, BOTH = (-2,), (-1, -2)
MIXED = ("tcgen05", "compact")

# format, axes, layout, dtype and what differs from the defaults: each is another kernel.
CASES: list[tuple[str, tuple[int, ...], Any, torch.dtype, dict[str, Any]]] = [
    ("nvfp4", COLUMNS, "tcgen05", BF16, {}),
    ("nvfp4", COLUMNS, "compact", FP32, {"nonfinite": "te"}),
    ("nvfp4", BOTH, MIXED, FP32, {}),
    ("nvfp4", BOTH, "compact", FP16, {"nonfinite": "te"}),
    ("mxfp4", COLUMNS, "tcgen05", FP16, {"scale_rounding": "floor"}),
    ("mxfp4", COLUMNS, "compact", BF16, {"nonfinite": "te"}),
    ("mxfp4", BOTH, "packed", BF16, {"scale_rounding": "even"}),
    ("mxfp4", BOTH, "tcgen05", FP32, {"nonfinite": "te", "scale_rounding": "ceil"}),
]


def _global(format: str, value: float = 0.37) -> dict[str, Any]:
    return {"global_scale": torch.tensor(value)} if formats[format].has_global_scale else {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("format", "axes", "layout", "dtype", "given"), CASES)
def test_formats(format, axes, layout, dtype, given, arch):
    # a number's size is that of its block along columns
    x = nasty(160, 40, dtype).mT.contiguous()
    check(x, format, arch, axes, layout=layout, **given, **_global(format))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("format", "shape", "axes", "completion"),
    [
        ("nvfp4", (1, 64), COLUMNS, "late"),
        ("nvfp4", (129, 96), BOTH, "eager"),  # 72 bytes a column: no multiple of 16
        ("nvfp4", (33, 272), COLUMNS, "random"),
        ("nvfp4", (256, 24), BOTH, "random"),
        ("mxfp4", (31, 16), BOTH, "late"),
        ("mxfp4", (161, 136), COLUMNS, "random"),
    ],
)
def test_shapes(format, shape, axes, completion, arch):
    """Tails and padding; memory is filled with other bytes before."""
    x = nasty(*shape, BF16, seed=sum(shape))
    given = {"layout": "tcgen05", "completion": completion}
    check(x, format, arch, axes, **given, **_global(format, 1e-3))


def test_strides():
    """Data is contraction-major, in memory as in the reference."""
    x = nasty(40, 48, BF16)
    ((data, _),), _ = emulated(x, "mxfp4", "sm_90a", COLUMNS)
    want, _ = reference.quantize(x, formats["mxfp4"], axis=-2)
    assert data.shape == want.shape == (32, 48)
    assert data.stride() == want.stride() == (1, 32)


def test_strided_misaligned_and_odd():
    whole = nasty(40, 400, BF16)
    check(whole[::2, 8:136], "nvfp4", "sm_90a", COLUMNS, **_global("nvfp4"))
    check(whole[:, 1:65], "nvfp4", "sm_90a", BOTH, **_global("nvfp4"))  # TMA does not load it
    check(whole[:, :37].contiguous(), "mxfp4", "sm_100a", BOTH, layout="packed")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_bf16(arch):
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    x = patterns.view(BF16).view(512, 128)
    # far apart, and next to each other: sorted blocks are all special or all not
    for each in (x, x.view(128, 512).mT.contiguous()):
        check(each, "mxfp4", arch, COLUMNS, layout="tcgen05", nonfinite="te")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("format", "axes"), [("nvfp4", BOTH), ("mxfp4", COLUMNS)])
def test_sectors_and_banks(format, axes, arch):
    """No sector of global memory is moved in part, and none twice; words of shared memory that a
    warp asks for at once lie in different banks.
    """
    rows, columns = 128, 1024
    x, fmt = nasty(rows, columns, BF16), formats[format]
    (report,) = check(x, format, arch, axes, layout="tcgen05", profile=True, **_global(format))
    write, read = report.global_memory("write"), report.global_memory("read")
    each = fmt.element.bits / 8 + fmt.scale.nbytes / fmt.block_size
    assert write.asked == 32 * write.sectors == len(axes) * int(each * rows * columns)
    scalars = 32 * 64 if fmt.has_global_scale else 0  # a sector, read by every warp
    assert 2 * rows * columns <= 32 * read.sectors <= 2 * rows * columns + scalars
    if axes == COLUMNS:  # the table of reciprocals of nvfp4 is read where scales say, though
        assert {bank.place.opcode for bank in report.banks if bank.conflicts} <= {"st.shared.b8"}


def test_same_bytes_again():
    x = nasty(128, 128, BF16)
    first, second = (emulated(x, "mxfp4", "sm_90a", BOTH, completion="random")[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same(a[0], b[0], "data")
        assert_same(a[1], b[1], "scales")


@pytest.mark.parametrize(
    ("producer", "format"), [("swiglu", "nvfp4"), ("swiglu_backward", "mxfp4")]
)
def test_producers(producer, format):
    x, grad = nasty(40, 256, BF16), nasty(40, 128, BF16, seed=1)
    others = (grad,) if producer == "swiglu_backward" else ()
    made = reference.swiglu_backward(grad, x) if others else reference.swiglu(x)
    given = _global(format)
    results, _ = emulated(
        x, format, "sm_100a", BOTH, producer=producer, others=others, nonfinite="te", **given
    )
    for axis, (data, scale) in zip(BOTH, results, strict=True):
        want_data, want_scale = expected(made, format, axis, "compact", nonfinite="te", **given)
        assert_same(data, want_data, f"data along {axis}")
        assert_same(scale, want_scale, f"scales along {axis}")
