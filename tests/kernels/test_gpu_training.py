"""What training asks of the GPU quantizers, in the emulator: stochastic rounding, Hadamard
transforms and scales of squares. The reference's bytes."""

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import (
    ARCHITECTURES,
    assert_same,
    check,
    emulated,
    expected,
    in_turn,
    nasty,
    poisoned,
)

import blockscale as bs
from blockscale import emulator as em
from blockscale import reference
from blockscale.formats import formats
from blockscale.hadamard import transformed
from blockscale.kernels.common.runtime import describe
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers.calls import Request
from blockscale.nn.method_launches import operand_launch
from blockscale.nn.quantize_launches import Asked
from blockscale.nn.seeds import LayerSeed, OperandSeed
from blockscale.philox import random_bits
from blockscale.seed import Numbers
from stand_in import chip
from stand_in import emulated as on_a_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
SEED = bs.Seed(-7, step=2**40 + 3)


def _global(format: str, value: float = 0.37) -> dict[str, Any]:
    return {"global_scale": torch.tensor(value)} if formats[format].has_global_scale else {}


# --- stochastic rounding --------------------------------------------------------------------------

# format, axes, layout, dtype and what differs from the defaults: each is another kernel.
STOCHASTIC: list[tuple[str, tuple[int, ...], str, torch.dtype, dict[str, Any]]] = [
    ("nvfp4", ROWS, "tcgen05", BF16, {}),
    ("nvfp4", COLUMNS, "tcgen05", BF16, {"nonfinite": "te"}),
    ("nvfp4", BOTH, "compact", FP32, {"nonfinite": "te"}),
    ("mxfp4", BOTH, "packed", FP16, {"scale_rounding": "floor"}),
    ("mxfp8", ROWS, "compact", FP32, {"scale_rounding": "floor"}),
    ("mxfp8", BOTH, "tcgen05", BF16, {"k_major": True}),
    ("mxfp8", COLUMNS, "compact", FP16, {"nonfinite": "te"}),
    ("mxfp8_e5m2", BOTH, "compact", FP32, {"nonfinite": "te"}),
    ("fp8_1x128", BOTH, "sm90", BF16, {}),
    ("fp8_1x128", COLUMNS, "compact", FP32, {"k_major": True, "nonfinite": "te"}),
    ("fp8_128x128", BOTH, "compact", BF16, {}),
]


@pytest.mark.parametrize(
    ("arch", "format", "axes", "layout", "dtype", "given"), in_turn(STOCHASTIC)
)
def test_stochastic_formats(arch, format, axes, layout, dtype, given):
    x = nasty(160, 80, dtype)
    x = x if axes == ROWS else x.view(80, 160).mT.contiguous()
    check(x, format, arch, axes, layout=layout, seed=SEED, **given, **_global(format))


@pytest.mark.parametrize(
    ("shape", "seed"),
    [
        ((33, 37), SEED),  # rows of which none begins with a call of Philox, but the first
        ((40, 48), bs.Seed(5, 1, origin=(2**23, 2**32 + 3), shape=(2**24, 2**33 + 8))),
        ((40, 48), bs.Seed(5, 1, origin=(2**23 + 5, 2**32 + 4), shape=(2**24, 2**33 + 8))),
        ((3, 40, 48), bs.Seed(5, -1, origin=(2, 8, 16), shape=(9, 64, 80))),
        ((64,), SEED),
    ],
)
@pytest.mark.parametrize(("format", "arch"), [("nvfp4", "sm_90a"), ("mxfp8", "sm_100a")])
def test_stochastic_parts(shape, seed, format, arch):
    """Of a tensor whose numbers need 64 bits, and of batches."""
    x = nasty(torch.Size(shape).numel() // shape[-1], shape[-1], BF16).view(shape)
    check(x, format, arch, BOTH if len(shape) > 1 else ROWS, seed=seed, **_global(format))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_all_of_a_fraction_counts(format):
    """Of numbers of many sizes, from the largest element to far below the smallest."""
    x = torch.full((256, 128), 1.0)
    x[:, 1:] = torch.exp2(-torch.arange(127) / 4.0) * (1 + torch.arange(256).view(-1, 1) / 256)
    x[:, 0] = 6.0 if format == "nvfp4" else 448.0
    x[:, 1 :: 16 if format == "nvfp4" else 32] = x[0, 0]
    for arch in ARCHITECTURES:
        check(x, format, arch, BOTH, seed=SEED, **_global(format, 1.0))


@pytest.mark.parametrize(
    ("arch", "format", "axes"),
    in_turn([("nvfp4", ROWS), ("nvfp4", BOTH), ("mxfp8", ROWS), ("mxfp8", BOTH)]),
)
def test_stochastic_small(arch, format, axes):
    """Tensors that do not fill a GPU, whose tiles take more warps, or have few rows."""
    for rows in (7, 130):
        x = nasty(rows, 272, BF16)
        given = {"seed": SEED, "layout": "tcgen05", "multiprocessors": 132}
        check(x, format, arch, axes, **given, **_global(format))


def test_a_step_is_read_when_the_kernel_runs():
    """From the device: another one is no other kernel, and a tensor rounds as its number."""
    x, step = nasty(64, 64, BF16), torch.tensor(3)
    with on_a_gpu("sm_90a", quantizes=True) as launched:
        seed = bs.Seed(7, step=step)
        for value in (3, 2**40):
            step.fill_(value)
            for axis in (-1, -2):
                q = bs.quantize(x, "mxfp4", axis, seed=seed, backend="kernel")
                want = bs.quantize(x, "mxfp4", axis, seed=bs.Seed(7, value), backend="reference")
                assert_same(q.qdata, want.qdata, "data")
    assert len(launched) == 4
    assert len(set(launched)) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grouped": True}, "seed: no kernel takes it with offsets"),
        ({"gather": True}, "seed: no kernel takes it with gather"),
        ({"producer": "swiglu"}, "seed: no kernel takes it with producer swiglu"),
    ],
)
def test_refusals(given, message):
    asked = Request("mxfp8", BOTH, ("compact",) * 2, stochastic=True, **given)
    assert message in quantizers.unsupported(torch.zeros(64, 512), asked, chip("sm_90a"))


# --- Hadamard -------------------------------------------------------------------------------------

HADAMARD: list[tuple[str, tuple[int, ...], str, torch.dtype, int, dict[str, Any]]] = [
    ("nvfp4", ROWS, "tcgen05", BF16, 16, {}),
    ("nvfp4", COLUMNS, "tcgen05", BF16, 16, {"nonfinite": "te"}),
    ("nvfp4", BOTH, "compact", BF16, 16, {"seed": SEED}),
    ("nvfp4", BOTH, "compact", FP32, 32, {"nonfinite": "te"}),
    ("nvfp4", ROWS, "compact", FP16, 2, {}),
    ("mxfp4", BOTH, "packed", FP16, 8, {}),
    ("mxfp4", COLUMNS, "compact", BF16, 32, {"seed": SEED}),
    ("nvfp4", COLUMNS, "tcgen05", BF16, 128, {"nonfinite": "te"}),
    ("nvfp4", BOTH, "compact", FP32, 64, {"seed": SEED}),
    ("mxfp4", COLUMNS, "packed", FP16, 128, {}),
    ("mxfp8", ROWS, "compact", FP32, 64, {"nonfinite": "te", "seed": SEED}),
    ("mxfp8_e5m2", ROWS, "tcgen05", BF16, 4, {}),
    ("fp8_1x128", ROWS, "sm90", BF16, 128, {}),
]


@pytest.mark.parametrize(
    ("arch", "format", "axes", "layout", "dtype", "size", "given"), in_turn(HADAMARD)
)
def test_hadamard(arch, format, axes, layout, dtype, size, given):
    shape = (256, 128) if size > 32 else (160, 96)
    x, h = nasty(*shape, dtype), bs.Hadamard.random(size, size)
    check(x, format, arch, axes, layout=layout, hadamard=h, **given, **_global(format))


@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (3, 32, 48)])
@pytest.mark.parametrize("axes", [ROWS, COLUMNS])
def test_hadamard_shapes(shape, axes):
    x = nasty(torch.Size(shape).numel() // shape[-1], shape[-1], BF16).view(shape)
    check(x, "nvfp4", "sm_100a", axes, hadamard=bs.Hadamard(16, 0xA1C3), **_global("nvfp4"))


@pytest.mark.parametrize(
    ("arch", "axis", "size"),
    in_turn([(-1, 16), (-1, 128), (-2, 16), (-2, 32), (-2, 4), (-2, 64), (-2, 128)]),
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_hadamard_of_the_global_scale(arch, axis, size, dtype):
    """That of the transformed tensor, wherever its largest number is."""
    h = bs.Hadamard.random(1, size)
    last = max(size, 32)
    for i, rows in enumerate((last, last + 128)):
        x = nasty(rows, 256, dtype, seed=i)
        # in the last block alone: a sum of large numbers, which no other sum comes near
        x[-last:, -128:] = torch.finfo(dtype).max / 256
        device = em.Device(arch, completion="random", check="all,exit_stores")
        with em.cutedsl(device), poisoned():
            got = quantizers.global_scale(
                x, formats["nvfp4"], axis=axis, hadamard=h, gpu=chip(arch, 0)
            )
        want = reference.global_scale(transformed(x, h, axis), formats["nvfp4"])
        assert_same(got.view(1), want.view(1), "global scale")


# format, axes, dtype, size and what else is done: signs are words of 32, for lanes of 16 elements.
DRAWN: list[tuple[str, tuple[int, ...], torch.dtype, int, dict[str, Any]]] = [
    ("nvfp4", BOTH, BF16, 2, {}),
    ("nvfp4", ROWS, FP32, 16, {"seed": SEED}),
    ("nvfp4", COLUMNS, BF16, 16, {"seed": SEED, "scaling": "ms_eden"}),
    ("nvfp4", BOTH, FP32, 32, {"seed": SEED, "scaling": "ms_eden"}),
    ("nvfp4", COLUMNS, FP32, 64, {"nonfinite": "te"}),
    ("nvfp4", BOTH, BF16, 128, {"seed": SEED, "scaling": "ms_eden"}),
    ("nvfp4", COLUMNS, FP32, 128, {"seed": SEED}),
    ("mxfp8", ROWS, FP16, 4, {}),
]


def signed(x: torch.Tensor, axis: int, size: int, seed: bs.Seed) -> torch.Tensor:
    """``x``, and where the lowest random bit of an element of a block is 1 its negative."""
    bits = random_bits(Numbers(seed.value, int(seed.step), 0, 0, 0), torch.empty(size)) % 2
    signs = torch.where(bits == 1, -1, 1).to(x.dtype).repeat(x.shape[axis] // size)
    return x * (signs if axis == -1 else signs[:, None])


@pytest.mark.parametrize(("arch", "format", "axes", "dtype", "size", "given"), in_turn(DRAWN))
def test_drawn_signs(arch, format, axes, dtype, size, given):
    """By a value and a step of 64 bits: those of what torch has negated before."""
    x, seed = nasty(256, 128, dtype), bs.Seed(2**62 + 5 if size > 16 else -3, torch.tensor(-9))
    given = given | _global(format)
    results, _ = emulated(x, format, arch, axes, hadamard=bs.Hadamard(size, seed), **given)
    for axis, (data, scale) in zip(axes, results, strict=True):
        negated, plain = signed(x, axis, size, seed), bs.Hadamard(size)
        want = expected(negated, format, axis, "compact", hadamard=plain, **given)
        assert_same(data, want[0], f"data along {axis}")
        assert_same(scale, want[1], f"scales along {axis}")


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("arch", "size", "dtype"), in_turn([(16, BF16), (32, FP32), (128, BF16), (128, FP32)])
)
def test_drawn_signs_of_the_global_scale(arch, axis, size, dtype):
    """Of another step it is another one."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    step, found = torch.tensor(0), set()
    for value in (1, 2**33 + 1):
        step.fill_(value)
        seed = bs.Seed(11, step)
        device = em.Device(arch, completion="random", check="all,exit_stores")
        with em.cutedsl(device), poisoned():
            got = quantizers.global_scale(
                *(x, formats["nvfp4"]),
                axis=axis,
                hadamard=bs.Hadamard(size, seed),
                scaling="ms_eden",
                gpu=chip(arch, 0),
            )
        turned = transformed(signed(x, axis, size, seed), bs.Hadamard(size), axis)
        want = reference.global_scale(turned, formats["nvfp4"]) * (448 / 256)
        assert_same(got.view(1), want.view(1), "global scale")
        found.add(float(got))
    assert len(found) == 2


def test_signs_are_drawn_when_a_kernel_runs():
    """By one plan, of a layer's operand by rows and by columns, in two steps; torch draws none."""
    x, step = nasty(128, 256, BF16).nan_to_num(0, 0, 0), torch.tensor(0)
    recipe = bs.Recipe.nvfp4("ms_eden")
    seed, found = OperandSeed(LayerSeed(3, step), "gradients"), []
    how = {"scaling": "ms_eden", "hadamard": bs.Hadamard(128)}
    with on_a_gpu("sm_90a", quantizes=True) as launched:
        asked = Asked.of(recipe, "gradients", x.device, rows=True, columns=True)
        launch = operand_launch(describe(x), asked)
        for value in (3, 2**40):
            step.fill_(value)
            with patch("blockscale.hadamard.random_bits", side_effect=AssertionError):
                found.append(launch(x, None, seed))
    assert [config.hadamard for config in launched] == [128] * 8
    assert len(set(launched)) == 4
    for value, forms in zip((3, 2**40), found, strict=True):
        # numbers of a layer are 8 times its own, and more: of gradients, of dgrad and of wgrad
        for axis, number, parts in ((-1, 28, forms[0]), (-2, 29, forms[1])):
            negated = signed(x, axis, 128, bs.Seed(number, value))
            given = how | {"seed": bs.Seed(26, value), "backend": "reference"}
            want = bs.quantize(negated, "nvfp4", axis, **given)
            got = launch.form(parts, axis)
            assert_same(got.qdata, want.qdata, "data")
            assert_same(got.compact_scale(), want.compact_scale(), "scales")
            assert torch.equal(got.global_scale, want.global_scale)
    assert not torch.equal(found[0][0].data, found[1][0].data)


@pytest.mark.parametrize("axis", [-1, -2])
def test_hadamard_in_one_call(axis):
    """``bs.quantize`` runs kernels only, of which no one reads a transformed tensor."""
    x, h = nasty(64, 128, BF16), bs.Hadamard.random(3)
    with on_a_gpu("sm_90a", quantizes=True) as launched:
        q = bs.quantize(x, "nvfp4", axis, hadamard=h, seed=SEED, backend="kernel")
    assert [config.hadamard for config in launched] == [16, 16]
    assert all(config.dtype.itemsize == 2 for config in launched)
    want = bs.quantize(x, "nvfp4", axis, hadamard=h, seed=SEED, backend="reference")
    assert_same(q.qdata, want.qdata, "data")
    assert_same(q.qscale, want.qscale, "scales")
    assert torch.equal(q.global_scale, want.global_scale)


def test_hadamard_by_torch():
    """Where no kernel transforms one quantizes what torch transforms, and it is said."""
    x, h = nasty(64, 128, BF16), bs.Hadamard.random(3)
    with on_a_gpu("sm_90a", quantizes=True) as launched:
        with pytest.warns(bs.FallbackWarning, match="hadamard with axis=-2: .*8-bit elements"):
            q = bs.quantize(x, "mxfp8", -2, hadamard=h)
        with pytest.raises(ValueError, match=r"hadamard with axis=-2: .*8-bit elements"):
            bs.quantize(x, "mxfp8", -2, hadamard=h, backend="kernel")
    assert [config.hadamard for config in launched] == [0]
    assert_same(q.qdata, bs.quantize(x, "mxfp8", -2, hadamard=h).qdata, "data")


@pytest.mark.parametrize(
    ("format", "axes", "size", "given", "message"),
    [
        ("mxfp8", ROWS, 16, {"grouped": True}, "hadamard: no kernel takes it with offsets"),
        ("mxfp8", ROWS, 16, {"gather": True}, "hadamard: no kernel takes it with gather"),
        ("mxfp8", COLUMNS, 16, {}, "hadamard with axis=-2: .* 8-bit"),
        ("fp8_128x128", ROWS, 16, {}, "hadamard: .*fp8_128x128"),
        ("nvfp4", ROWS, 128, {}, "hadamard: dimension -1 is 96, no multiple of 128"),
    ],
)
def test_hadamard_refusals(format, axes, size, given, message):
    asked = Request(format, axes, ("compact",), hadamard=size, **given)
    assert re.match(message, quantizers.unsupported(torch.zeros(64, 96), asked, chip("sm_90a")))


# --- squares --------------------------------------------------------------------------------------

SQUARE: list[tuple[str, tuple[int, ...], str, torch.dtype, dict[str, Any]]] = [
    ("nvfp4", ROWS, "tcgen05", BF16, {}),
    ("nvfp4", COLUMNS, "tcgen05", BF16, {}),
    ("nvfp4", BOTH, "tcgen05", FP32, {"nonfinite": "te"}),
    ("nvfp4", BOTH, "compact", BF16, {"seed": SEED}),
    ("mxfp4", BOTH, "packed", FP16, {}),
    ("mxfp8", ROWS, "compact", BF16, {}),
    ("mxfp8", COLUMNS, "packed", FP16, {}),
    ("mxfp8", BOTH, "tcgen05", FP32, {"nonfinite": "te", "seed": SEED}),
    ("mxfp8_e5m2", BOTH, "tcgen05", BF16, {"k_major": True}),
    ("fp8_1x128", BOTH, "sm90", BF16, {}),
    ("fp8_1x128", COLUMNS, "compact", FP32, {"nonfinite": "te", "k_major": True}),
]


@pytest.mark.parametrize(("arch", "format", "axes", "layout", "dtype", "given"), in_turn(SQUARE))
def test_square(arch, format, axes, layout, dtype, given):
    """Squares hang over both edges: what is past them has no scale."""
    x = nasty(150, 72, dtype)
    check(x, format, arch, axes, layout=layout, square=True, **given, **_global(format))


@pytest.mark.parametrize("shape", [(1, 16), (129, 272), (33, 37), (3, 40, 72)])
@pytest.mark.parametrize(("format", "arch"), [("nvfp4", "sm_100a"), ("mxfp8", "sm_90a")])
def test_square_shapes(shape, format, arch):
    x = nasty(torch.Size(shape).numel() // shape[-1], shape[-1], BF16).view(shape)
    check(x, format, arch, BOTH, square=True, completion="random", **_global(format))


def test_square_in_one_call():
    """Both axes from one read, with the same elements."""
    x = nasty(64, 128, BF16)
    with on_a_gpu("sm_90a", quantizes=True) as launched:
        both = bs.quantize_both(x, "nvfp4", square=True, backend="kernel")
    assert [(config.axes, config.square) for config in launched] == [((), False), (BOTH, True)]
    wanted = bs.quantize_both(x, "nvfp4", square=True, backend="reference")
    for got, want in zip(both, wanted, strict=True):
        assert_same(got.qdata, want.qdata, "data")
        assert_same(got.qscale, want.qscale, "scales")


@pytest.mark.parametrize(
    ("format", "given", "message"),
    [
        ("mxfp8", {"grouped": True}, "square: no kernel takes it with offsets"),
        ("mxfp8", {"gather": True}, "square: no kernel takes it with gather"),
        ("mxfp8", {"hadamard": 16}, "square: no kernel takes it with hadamard"),
        ("fp8_128x128", {}, "square: blocks of fp8_128x128 are squares"),
    ],
)
def test_square_refusals(format, given, message):
    asked = Request(format, ROWS, ("compact",), square=True, **given)
    assert message in quantizers.unsupported(torch.zeros(64, 96), asked, chip("sm_90a"))


def test_same_bytes_again():
    x = nasty(128, 128, BF16)
    given = {"completion": "random", "seed": SEED, "hadamard": bs.Hadamard.random(1)}
    first, second = (emulated(x, "mxfp4", "sm_90a", BOTH, **given)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same(a[0], b[0], "data")
