"""RMSNorm and quantization in one kernel, run in the emulator: its bytes are the reference's."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, nasty, poisoned

from blockscale import emulator as em
from blockscale import reference
from blockscale.dtypes import BFLOAT16, FLOAT32, from_torch
from blockscale.emulator.observe.report import Report
from blockscale.formats import formats
from blockscale.kernels.common.builders import build_kernel
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers import norm, norm_config
from blockscale.kernels.quantizers.config import Request
from blockscale.layouts import as_bytes, get_layout
from stand_in import chip

MACHINE: dict[str, int] = {}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of all sizes; every fourth with NaN, infinities and sums that overflow, some zero, some
    with subnormal squares.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = (-14, 12) if dtype == FP16 else (-60, 50)
    size = torch.randint(low, high, (m, 1), generator=generator)
    vary = torch.randint(-4, 4, (m, -(-k // 16)), generator=generator)
    exponent = size + vary.repeat_interleave(16, 1)[:, :k]
    x = torch.randn(m, k, generator=generator) * torch.exp2(exponent.float())
    x[torch.rand(m, k, generator=generator) < 0.02] = -0.0
    x = x.to(dtype)
    x[1::4] = nasty(m, k, dtype, seed)[1::4]
    x[5::8] = nasty(m, k, dtype, seed + 1)[5::8].nan_to_num(0.0, 1.0, -1.0)
    x[2::7] = 0.0
    return x


def weights(k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    weight = 1 + torch.randn(k, generator=generator)
    weight[::37] = 0.0
    weight[5::301] = float("inf")
    return weight.to(dtype)


def check(
    x: Tensor,
    weight: Tensor,
    format: str,
    arch: str,
    *,
    layout: str = "compact",
    eps: float = EPS,
    completion: str = "late",
    profile: bool = False,
    **kwargs: Any,
) -> Report:
    """Assert that the kernel's bytes are the reference's."""
    fmt = formats[format]
    device = em.Device(arch, completion=completion, check="all,exit_stores")
    with em.cutedsl(device, profile=profile) as reports, poisoned():
        names = {name: value for name, value in kwargs.items() if name != "global_scale"}
        data, scale, rstd = norm.rmsnorm(
            x,
            weight,
            Request(format, layouts=(layout,), **names),
            eps=eps,
            global_scale=kwargs.get("global_scale"),
            gpu=chip(arch, **MACHINE),
        )
    y, want = reference.rmsnorm(x, weight, eps)
    assert rstd.shape == want.shape
    assert_same(rstd.view(-1), want.view(-1), "rstd")
    kwargs.setdefault("scale_rounding", fmt.default_scale_rounding)
    codes, scales = reference.quantize(y, fmt, **kwargs)
    scales = as_bytes(scales)
    assert_same(
        scale, scales if layout == "compact" else get_layout(layout).swizzle(scales), layout
    )
    assert_same(data, codes, "data")
    (report,) = reports
    return report


@pytest.fixture
def small_machine(monkeypatch):
    """A machine of one multiprocessor: few rows make blocks as many rows make them elsewhere."""
    monkeypatch.setitem(MACHINE, "multiprocessors", 1)


# format, layout, dtype of x and of the weight, shape, and what differs from the defaults
CASES: list[tuple[str, str, torch.dtype, torch.dtype, tuple[int, int], dict[str, Any]]] = [
    ("mxfp8", "tcgen05", BF16, BF16, (40, 544), {}),
    ("mxfp8", "compact", FP16, FP32, (37, 512), {"nonfinite": "te"}),
    ("mxfp8", "packed", FP32, BF16, (19, 1056), {"scale_rounding": "floor"}),
    ("mxfp8_e5m2", "tcgen05", FP32, FP32, (21, 160), {"nonfinite": "te"}),
    ("mxfp8_e5m2", "packed", BF16, FP16, (35, 304), {"scale_rounding": "even"}),
    ("mxfp4", "tcgen05", BF16, BF16, (40, 192), {"nonfinite": "te"}),
    ("mxfp4", "compact", FP16, FP16, (37, 96), {"scale_rounding": "ceil"}),
    ("nvfp4", "tcgen05", BF16, BF16, (40, 176), {"global_scale": 0.037}),
    ("nvfp4", "packed", FP32, BF16, (18, 1040), {"global_scale": 1e-4, "nonfinite": "te"}),
    ("fp8_1x128", "sm90", BF16, BF16, (38, 640), {}),
    ("fp8_1x128", "compact", FP32, FP32, (19, 1104), {"nonfinite": "te"}),
    ("fp8_1x128", "sm90", FP16, BF16, (33, 896), {"scale_rounding": "rceil"}),
]


def test_name_of_the_function_is_not_a_module():
    """A submodule of the same name would take its place once it is imported."""
    import blockscale.kernels.quantizers.rmsnorm_kernel  # noqa: F401

    assert quantizers.rmsnorm is norm.rmsnorm


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:3])) for c in CASES])
def test_formats(i, small_machine):
    format, layout, dtype, weight_dtype, shape, given = CASES[i]
    if "global_scale" in given:
        given = given | {"global_scale": torch.tensor(given["global_scale"])}
    x, weight = rows(*shape, dtype, seed=i), weights(shape[1], weight_dtype, seed=i)
    both = format in ("mxfp4", "nvfp4") or i == 0  # their instructions differ
    for arch in ARCHITECTURES if both else ARCHITECTURES[i % 2 :][:1]:
        check(x, weight, format, arch, layout=layout, **given)


@pytest.mark.parametrize(
    ("arch", "shape", "layout", "completion"),
    [
        ("sm_90a", (1, 512), "tcgen05", "late"),
        ("sm_100a", (3, 32), "packed", "eager"),
        ("sm_100a", (100, 96), "tcgen05", "random"),
        ("sm_90a", (129, 1), "tcgen05", "random"),
        ("sm_90a", (5, 7168), "compact", "random"),
        ("sm_100a", (6, 2880), "packed", "late"),
    ],
)
def test_shapes(arch, shape, layout, completion):
    """Tails and padding; memory is filled with other bytes before. Few rows: one a block."""
    x = rows(*shape, BF16, seed=sum(shape))
    check(x, weights(shape[1], BF16), "mxfp8", arch, layout=layout, completion=completion)


@pytest.mark.parametrize(
    ("k", "dtype", "arch"),
    [(1, BF16, "sm_90a"), (15, FP32, "sm_100a"), (33, FP16, "sm_100a"), (530, BF16, "sm_90a")],
)
def test_odd_columns(k, dtype, arch, small_machine):
    """Loads of one element at a time; blocks that are padded."""
    x, weight = rows(9, k, dtype, seed=k), weights(k, dtype)
    check(x, weight, "mxfp8", arch, layout="tcgen05", nonfinite="te")


def test_few_warps_for_many_segments(small_machine, monkeypatch):
    """A warp takes several segments of a row, and not all warps equally many."""
    monkeypatch.setattr(norm_config, "_WARPS", 7)
    x = rows(6, 3600, BF16)
    config = norm_config.choose_norm(
        (6, 3600),
        (0, 7200),
        BFLOAT16,
        (0, BFLOAT16),
        Request("mxfp8"),
        chip("sm_90a", 1),
    )
    assert (config.segments, config.segment_warps) == (8, 3)
    check(x, weights(3600, FP32), "mxfp8", "sm_90a", layout="packed", completion="random")


def test_strided_and_misaligned(small_machine):
    whole, weight = rows(8, 700, BF16), weights(300, BF16)
    check(whole[::2, 8:264], weight[:256], "mxfp8", "sm_90a")  # bulk copies
    check(whole[:, 1:257], weight[:256], "mxfp8", "sm_90a")  # an address that they do not take
    check(whole[:, :256], weight[1:257], "mxfp8", "sm_90a")  # weights one at a time
    check(whole[:, :300], weight, "mxfp8", "sm_90a")  # rows that end within 16 bytes


def test_shapes_of_rows():
    x, weight = rows(6, 64, BF16), weights(64, BF16)
    check(x.view(2, 3, 64), weight, "mxfp8", "sm_90a")
    check(x[0], weight, "mxfp8", "sm_90a")
    check(x.view(3, 2, 64)[:, 0], weight, "nvfp4", "sm_100a", global_scale=torch.tensor(1.0))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 3.0])
def test_eps(eps):
    """With none, the rstd of zeros is infinite: their product is a NaN, and padding is still 0."""
    x = rows(16, 80, BF16)
    assert not x[2].any()
    for policy in ("propagate", "te"):
        check(x, weights(80, BF16), "fp8_1x128", "sm_90a", eps=eps, nonfinite=policy)


@pytest.mark.parametrize(
    ("format", "layout", "arch"),
    [
        ("mxfp8", "tcgen05", "sm_90a"),
        ("mxfp8", "compact", "sm_100a"),
        ("nvfp4", "tcgen05", "sm_100a"),
        ("fp8_1x128", "sm90", "sm_90a"),
    ],
)
def test_sectors(format, layout, arch, small_machine):
    """No sector of data or scales is moved in part, none of ``x`` twice."""
    m, k = 128, 1024
    fmt = formats[format]
    given = {"global_scale": torch.tensor(1.0)} if fmt.has_global_scale else {}
    x, weight = rows(m, k, BF16), weights(k, BF16)
    report = check(x, weight, format, arch, layout=layout, profile=True, **given)
    traffic = {
        kind: [s for s in report.sectors if s.kind == kind and s.asked > 4 * m]
        for kind in ("read", "write")
    }
    stored = int((fmt.element.bits / 8 + fmt.scale.nbytes / fmt.block_size) * m * k)
    assert sum(s.asked for s in traffic["write"]) == stored
    assert sum(32 * s.sectors for s in traffic["write"]) == stored
    copied = [s for s in traffic["read"] if s.place.opcode.startswith("cp.async.bulk")]
    assert sum(s.asked for s in copied) == sum(32 * s.sectors for s in copied) == 2 * m * k


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_are_not_fused(arch):
    """ptxas may fuse a multiplication and an addition unless both say how they are rounded."""
    config = norm_config.choose_norm(
        (64, 64), (0, 128), BFLOAT16, (0, BFLOAT16), Request("nvfp4"), chip(arch)
    )
    with em.cutedsl(em.Device(arch, check="all,exit_stores")):
        ptx = build_kernel(config).__ptx__
    assert "add.rn.f32" in ptx
    assert "add.f32" not in ptx
    assert "sub.f32" not in ptx


def test_largest_rows():
    """Shared memory holds what the chooser says, and one segment more is refused."""
    most = norm_config.most_columns(FLOAT32, formats["nvfp4"])
    x, weight = rows(1, most, FP32), weights(most, BF16)
    check(x, weight, "nvfp4", "sm_90a", layout="packed", global_scale=torch.tensor(0.1))
    x = torch.zeros(1, most + 1)
    reason = norm.unsupported_rmsnorm(x, formats["nvfp4"], "packed", chip("sm_90a"))
    assert f"{most + 1} columns: shared memory holds rows of at most {most}" in reason


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_choice(format, dtype, arch):
    """Blocks fit the multiprocessor, several where rows allow it, and there is one for each."""
    seen = set()
    for k in (32, 512, 1536, 4096, 7168, 16384, 28672):
        for m in (1, 128, 1000, 16384):
            source = 0, k * dtype.itemsize
            config = norm_config.choose_norm(
                (m, k), source, from_torch(dtype), (0, BFLOAT16), Request(format), chip(arch)
            )
            n = config.tile_rows
            row = config.segments * 512 * dtype.itemsize
            assert n in (1, 2, 4, 8, 16, 32)
            assert config.threads <= 1024
            assert n % config.row_warps == 0
            assert config.segments * 2 > config.segment_warps  # none without a segment
            assert n * row <= 75 << 10 or (n == 1 and row <= 227 << 10)
            blocks = -(-m // n)
            assert n == 1 or blocks >= chip(arch).multiprocessors
            seen.add(n)
    assert {1, 4, 32} <= seen


def test_same_bytes_again():
    x, weight = rows(16, 512, BF16), weights(512, BF16)
    found = []
    for _ in range(2):
        with (
            em.cutedsl(em.Device("sm_90a", completion="random", check="all,exit_stores")),
            poisoned(),
        ):
            found.append(norm.rmsnorm(x, weight, Request("mxfp8"), eps=EPS, gpu=chip("sm_90a")))
    for first, second, what in zip(*found, ("data", "scales", "rstd"), strict=True):
        assert_same(first, second, what)


X, W = torch.zeros(2, 64), torch.zeros(64)


@pytest.mark.parametrize(
    ("x", "weight", "format", "layout", "arch", "message"),
    [
        (X, W, "mxfp8", "compact", "sm_80", "sm_90a, sm_100a and sm_103a"),
        (X, W, "mxfp8", "compact", None, "x is on cpu"),
        (X.double(), W, "mxfp8", "compact", "sm_90a", "float64"),
        (X, W, "mxfp6_e2m3", "compact", "sm_90a", "6-bit"),
        (X, W, "mxfp8", "sm90", "sm_90a", "does not hold scales of mxfp8"),
        (X, W, "fp8_128x128", "compact", "sm_90a", "blocks of several rows"),
        (X[:0], W, "mxfp8", "compact", "sm_90a", "nothing to normalize"),
        (X.view(2, 1, 64), W, "mxfp8", "tcgen05", "sm_90a", "take matrices"),
        (X, W, "nvfp4", "compact", "sm_90a", "needs one"),
        (X, W[:32], "mxfp8", "compact", "sm_90a", r"weight: got \(32,\)"),
        (X, W.double(), "mxfp8", "compact", "sm_90a", "weight: got .* torch.float64"),
        (X, torch.zeros(128)[::2], "mxfp8", "compact", "sm_90a", "weight: got .* stride"),
        (X, W.to("meta"), "mxfp8", "compact", "sm_90a", "weight: is on meta"),
    ],
)
def test_refusals(x, weight, format, layout, arch, message):
    asked = Request(format, layouts=(layout,))
    with pytest.raises(ValueError, match=message):
        norm.rmsnorm(x, weight, asked, eps=EPS, gpu=arch and chip(arch))
