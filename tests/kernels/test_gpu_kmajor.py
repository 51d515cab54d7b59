"""8-bit columns stored K-major, by the GPU quantizers in the emulator: the reference's values."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, emulated, expected, nasty, produced

from blockscale.dtypes import BFLOAT16
from blockscale.formats import formats
from blockscale.kernels.quantizers.config import Request, choose_config

COMPLETIONS = ("late", "eager", "random")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COLUMNS, BOTH = (-2,), (-1, -2)

# format, axes, layout, dtype and what differs from the defaults: each is another kernel.
CASES: list[tuple[str, tuple[int, ...], str, torch.dtype, dict[str, Any]]] = [
    ("mxfp8", COLUMNS, "packed", BF16, {}),
    ("mxfp8", BOTH, "packed", BF16, {"nonfinite": "te"}),
    ("mxfp8", BOTH, "compact", FP32, {}),  # eight warps, of half a panel each
    ("mxfp8_e5m2", BOTH, "tcgen05", FP16, {"scale_rounding": "floor"}),
    ("fp8_1x128", COLUMNS, "sm90", FP16, {"nonfinite": "te"}),
    ("fp8_1x128", BOTH, "sm90", BF16, {}),
    ("fp8_1x128", BOTH, "compact", FP32, {"scale_rounding": "rceil"}),
    ("fp8_128x128", COLUMNS, "compact", FP32, {"nonfinite": "te"}),
    ("fp8_128x128", BOTH, "compact", BF16, {}),
]


def check(
    x: Tensor,
    format: str,
    arch: str,
    axes: tuple[int, ...],
    layout: str = "compact",
    completion: str = "late",
    producer: str = "load",
    others: tuple[Tensor, ...] = (),
    **given: Any,
) -> None:
    """Values and scales are those of columns in the order of x; only where they lie differs."""
    more = given | {"completion": completion, "producer": producer, "others": others}
    layouts = (layout,) * len(axes)
    results, _ = emulated(x, format, arch, axes, layouts=layouts, k_major=True, **more)
    made = produced(x, producer, others)
    for axis, (data, scale) in zip(axes, results, strict=True):
        want_data, want_scale = expected(made, format, axis, layout, **given)
        assert_same(data, want_data, f"data along {axis}")
        assert_same(scale, want_scale, f"scales along {axis}")
        assert (data if axis == -1 else data.mT).is_contiguous()


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:4])) for c in CASES])
def test_formats(i):
    format, axes, layout, dtype, given = CASES[i]
    # a number's size is that of its block along columns
    x = nasty(160, 140, dtype, seed=i).mT.contiguous()
    check(x, format, ARCHITECTURES[i % 2], axes, layout, COMPLETIONS[i % 3], **given)


@pytest.mark.parametrize(
    ("format", "layout", "shape", "completion"),
    [
        ("mxfp8", "packed", (1, 32), "late"),
        ("mxfp8", "packed", (33, 37), "eager"),  # an odd number of columns, each a whole line
        ("mxfp8", "packed", (300, 272), "random"),
        ("fp8_1x128", "sm90", (129, 24), "random"),
    ],
)
def test_shapes(format, layout, shape, completion):
    """Tails and padding; memory is filled with other bytes before."""
    check(nasty(*shape, BF16, seed=sum(shape)), format, "sm_90a", BOTH, layout, completion)


def test_strided_and_misaligned():
    whole = nasty(40, 400, BF16)
    check(whole[::2, 8:136], "mxfp8", "sm_90a", BOTH, "packed")  # strides that TMA takes
    check(whole[:, 1:65], "fp8_1x128", "sm_90a", COLUMNS, "sm90")  # an address that it does not


def test_every_bf16():
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    x = patterns.view(BF16).view(128, 512).mT.contiguous()  # sorted blocks
    check(x, "mxfp8", "sm_90a", COLUMNS, "packed")


@pytest.mark.parametrize(("producer", "axes"), [("swiglu", BOTH), ("swiglu_backward", COLUMNS)])
def test_producers(producer, axes):
    """Each part of what they make has its own columns."""
    x = nasty(33, 256, BF16)
    others = (nasty(33, 128, BF16, seed=1),) if producer == "swiglu_backward" else ()
    check(x, "mxfp8", "sm_90a", axes, "packed", producer=producer, others=others)


@pytest.mark.parametrize(
    ("format", "layout", "multiprocessors"),
    [("mxfp8", "packed", 0), ("mxfp8", "packed", 132), ("fp8_1x128", "sm90", 0)],
)
def test_sectors_and_banks(format, layout, multiprocessors):
    """No sector of global memory is moved in part, none twice; and no bank of shared memory is
    asked for more often at once than by the kernel that stores columns as they come.
    """
    rows, columns, fmt = 128, 128, formats[format]
    x, conflicts = nasty(rows, columns, BF16), []
    for k_major in (False, True):
        given = {"layouts": (layout,) * 2, "k_major": k_major, "profile": True}
        given["multiprocessors"] = multiprocessors
        _, (report,) = emulated(x, format, "sm_90a", BOTH, **given)
        write, read = report.global_memory("write"), report.global_memory("read")
        each = 1 + fmt.scale.nbytes / fmt.block_size
        assert write.asked == 32 * write.sectors == 2 * int(each * rows * columns)
        assert 32 * read.sectors == 2 * rows * columns
        count = Counter[str]()
        for bank in report.banks:
            count[bank.place.opcode] += bank.conflicts
        conflicts.append(+count)
    assert conflicts[0] == conflicts[1]


def test_the_same_kernels():
    """Rows, and columns of 4 bits, lie K-major as they are."""
    for format, axes in (("mxfp8", (-1,)), ("fp8_128x128", (-1,)), ("nvfp4", BOTH)):
        layouts = ("compact",) * len(axes)
        asked = Request(format, axes, layouts)
        found = [
            choose_config((512, 512), [(0, 1024)], BFLOAT16, asked._replace(k_major=k))
            for k in (False, True)
        ]
        assert found[0] == found[1]
