"""What training asks of the GPU quantizers, in the emulator: stochastic rounding. The reference's
bytes."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import assert_same, check, emulated, nasty

import blockscale as bs
from blockscale.formats import formats
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers.calls import Request
from stand_in import chip
from stand_in import emulated as on_a_gpu

ARCHITECTURES = ("sm_90a", "sm_100a")
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


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("format", "axes", "layout", "dtype", "given"), STOCHASTIC)
def test_stochastic_formats(format, axes, layout, dtype, given, arch):
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


def test_same_bytes_again():
    x = nasty(128, 128, BF16)
    given = {"completion": "random", "seed": SEED, "nonfinite": "te"}
    first, second = (emulated(x, "mxfp4", "sm_90a", BOTH, **given)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same(a[0], b[0], "data")
