"""Scales of NVFP4's blocks that are chosen by more than the largest element, by the GPU quantizers
in the emulator. The reference's bytes."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, check, in_turn, nasty
from kernel_code import built

import blockscale as bs
from blockscale import emulator as em
from blockscale.dtypes import from_torch
from blockscale.kernels.common.gpu import GPUS
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers.calls import Request
from blockscale.kernels.quantizers.config import choose_config
from stand_in import chip
from stand_in import emulated as on_a_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
SEED = bs.Seed(-7, step=2**40 + 3)
SCALAR = torch.tensor(0.37)


def ordinary(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, each block of a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    size = torch.randint(-8, 5, (rows, -(-columns // 16)), generator=generator)
    return (x * torch.exp2(size.float()).repeat_interleave(16, 1)[:, :columns]).to(dtype)


def scalar(x: Tensor) -> Tensor:
    """A global scale that fits ``x``."""
    return x.float().abs().max() / (6 * 256)


# --- four over six --------------------------------------------------------------------------------

FOUR: list[tuple[tuple[int, ...], str, torch.dtype, dict[str, Any]]] = [
    (ROWS, "tcgen05", BF16, {}),
    (ROWS, "compact", FP32, {"nonfinite": "te"}),
    (COLUMNS, "tcgen05", BF16, {"nonfinite": "te"}),
    (COLUMNS, "compact", FP16, {"hadamard": bs.Hadamard.random(1)}),
    (BOTH, "tcgen05", BF16, {}),
    (BOTH, "compact", FP32, {"hadamard": bs.Hadamard.random(2, 64), "nonfinite": "te"}),
]


@pytest.mark.parametrize(("arch", "axes", "layout", "dtype", "given"), in_turn(FOUR))
def test_four_over_six(arch, axes, layout, dtype, given):
    given = {"layout": layout, "scaling": "four_over_six", **given}
    check(nasty(192, 128, dtype), "nvfp4", arch, axes, global_scale=SCALAR, **given)
    x = ordinary(192, 128, dtype)
    check(x, "nvfp4", arch, axes, global_scale=scalar(x), **given)
    wanted = [
        bs.quantize(x, "nvfp4", scaling=name, global_scale=scalar(x)).qscale.view(torch.uint8)
        for name in ("amax", "four_over_six")
    ]
    assert 0.2 < (wanted[0] != wanted[1]).float().mean() < 0.8  # both scales are better somewhere


@pytest.mark.parametrize(
    ("arch", "axes", "dtype", "given"),
    in_turn(
        [
            (ROWS, BF16, {"layout": "tcgen05"}),
            (COLUMNS, FP32, {"nonfinite": "te"}),
            (BOTH, FP16, {}),
            (BOTH, BF16, {"layout": "tcgen05", "nonfinite": "te"}),
        ]
    ),
)
def test_four_over_six_of_squares(arch, axes, dtype, given):
    """They hang over both edges. Of normal numbers most squares are better by 6."""
    given = {"scaling": "four_over_six", "square": True, **given}
    torch.manual_seed(0)
    check(nasty(150, 72, dtype), "nvfp4", arch, axes, global_scale=SCALAR, **given)
    x = ordinary(150, 200, dtype)
    x[:, :104] = x[:, :104].sign() * (1 - 0.4 * torch.rand(150, 104)).to(dtype)
    x[:, :104:7] *= 0.1
    check(x, "nvfp4", arch, axes, global_scale=scalar(x), **given)
    wanted = [
        bs.quantize(x, "nvfp4", scaling=name, square=True, pad=True, global_scale=scalar(x))
        for name in ("amax", "four_over_six")
    ]
    six, four = (q.qscale.view(torch.uint8) for q in wanted)
    assert 0.05 < (six != four).float().mean() < 0.95


@pytest.mark.parametrize(
    ("arch", "shape"), in_turn([((7, 272),), ((130, 272),), ((33, 37),), ((3, 40, 80),)])
)
def test_four_over_six_shapes(arch, shape):
    """Small tensors have kernels of their own; edges; batches."""
    x = ordinary(torch.Size(shape).numel() // shape[-1], shape[-1], BF16).view(shape)
    for axes in (ROWS, COLUMNS):
        given = {"scaling": "four_over_six", "global_scale": scalar(x), "multiprocessors": 132}
        check(x, "nvfp4", arch, axes, completion="random", **given)


def test_first_of_two_that_are_alike():
    """Blocks of 6 alone have no error by either scale, blocks of zeros neither."""
    x = torch.zeros(32, 32)
    x[:, 5::7] = 6.0
    for arch in ARCHITECTURES:
        check(x, "nvfp4", arch, BOTH, scaling="four_over_six", global_scale=torch.tensor(1.0))


# --- MS-EDEN --------------------------------------------------------------------------------------

EDEN: list[tuple[tuple[int, ...], str, torch.dtype, int, dict[str, Any]]] = [
    (ROWS, "tcgen05", BF16, 16, {}),
    (ROWS, "compact", FP16, 32, {"nonfinite": "te"}),
    (ROWS, "compact", FP32, 128, {}),
    (COLUMNS, "tcgen05", BF16, 16, {"nonfinite": "te"}),
    (COLUMNS, "compact", FP32, 32, {}),
    (COLUMNS, "compact", FP16, 64, {}),
    (COLUMNS, "tcgen05", BF16, 128, {"nonfinite": "te"}),
    (BOTH, "compact", BF16, 64, {"nonfinite": "te"}),
    (BOTH, "tcgen05", BF16, 128, {}),
]


@pytest.mark.parametrize(("arch", "axes", "layout", "dtype", "size", "given"), in_turn(EDEN))
def test_ms_eden(arch, axes, layout, dtype, size, given):
    given = {"layout": layout, "scaling": "ms_eden", "seed": SEED, **given}
    given["hadamard"] = bs.Hadamard.random(size, size)
    check(nasty(256, 128, dtype), "nvfp4", arch, axes, global_scale=SCALAR, **given)
    x = ordinary(128, 256, dtype)
    check(x, "nvfp4", arch, axes, global_scale=scalar(x), **given)


@pytest.mark.parametrize(
    ("arch", "shape", "seed"),
    in_turn(
        [
            ((64, 96), bs.Seed(5, 1, origin=(2**23, 2**32 + 16), shape=(2**24, 2**33 + 8))),
            ((64, 96), bs.Seed(5, 1, origin=(2**23 + 5, 2**32 + 3), shape=(2**24, 2**33 + 8))),
            ((3, 64, 96), bs.Seed(5, -1, origin=(2, 8, 16), shape=(9, 96, 128))),
        ]
    ),
)
def test_ms_eden_parts(arch, shape, seed):
    """Of a tensor whose numbers need 64 bits, in rows that begin with a call of Philox or do not,
    and of batches."""
    x = ordinary(torch.Size(shape).numel() // shape[-1], shape[-1], BF16).view(shape)
    given = {"scaling": "ms_eden", "seed": seed, "hadamard": bs.Hadamard.random(4, 32)}
    check(x, "nvfp4", arch, BOTH, global_scale=scalar(x), **given)


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["four_over_six", "ms_eden"])
@pytest.mark.parametrize("size", [16, 128])
def test_in_one_call(scaling, size):
    """The global scale and the quantizer, and no other kernel, of one axis and of both."""
    x = ordinary(128, 128, BF16)
    given: dict[str, Any] = {"hadamard": bs.Hadamard.random(3, size), "scaling": scaling}
    given |= {"seed": SEED} if scaling == "ms_eden" else {}
    for axis in (-1, -2):
        with on_a_gpu("sm_90a", quantizes=True) as launched:
            q = bs.quantize(x, "nvfp4", axis, backend="kernel", **given)
        assert [(config.axes, config.scaling) for config in launched] == [
            ((), "amax"),
            ((axis,), scaling),
        ]
        want = bs.quantize(x, "nvfp4", axis, backend="reference", **given)
        assert torch.equal(q.global_scale, want.global_scale)
        assert_same(q.qdata, want.qdata, "data")
        assert_same(q.qscale, want.qscale, "scales")
    if scaling == "four_over_six":
        with on_a_gpu("sm_90a", quantizes=True) as launched:
            both = bs.quantize_both(x, "nvfp4", scaling=scaling, backend="kernel")
        assert [config.axes for config in launched] == [(), BOTH]
        wanted = bs.quantize_both(x, "nvfp4", scaling=scaling, backend="reference")
        for got, want in zip(both, wanted, strict=True):
            assert_same(got.qdata, want.qdata, "data")
            assert_same(got.qscale, want.qscale, "scales")


@pytest.mark.usefixtures("keep_code")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("scaling", ["four_over_six", "ms_eden"])
def test_no_product_is_fused_with_a_sum(scaling, arch):
    """ptxas fuses what has no rounding of its own: sums all have one."""
    asked = Request(
        *("nvfp4", BOTH, ("tcgen05",) * 2), scaling=scaling, stochastic=True, hadamard=32
    )
    config = choose_config((256, 256), [(0, 512)], from_torch(BF16), asked, GPUS[arch])
    with em.cutedsl(em.Device(arch)):
        sums = re.findall(r"\b(?:add|sub|fma)(?:\.\w+)*\.f32(?:x2)?\b", built(config).__ptx__)
    assert sums
    assert all(".rn." in each for each in sums)


@pytest.mark.parametrize(
    ("format", "given", "message"),
    [
        ("nvfp4", {"grouped": True}, "scaling: no kernel takes it with offsets"),
        ("nvfp4", {"gather": True}, "scaling: no kernel takes it with gather"),
        ("nvfp4", {"stochastic": True}, "scaling='four_over_six' with seed: "),
        ("mxfp4", {}, "scaling='four_over_six': is for nvfp4, not mxfp4"),
        ("nvfp4", {"scaling": "ms_eden"}, "scaling='ms_eden': needs a seed, and a hadamard"),
    ],
)
def test_refusals(format, given, message):
    asked = Request(format, ROWS, ("compact",), **{"scaling": "four_over_six", **given})
    assert re.match(message, quantizers.unsupported(torch.zeros(64, 96), asked, chip("sm_90a")))
