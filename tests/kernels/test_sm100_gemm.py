"""The block-scaled product for Blackwell, run in the emulator: bit for bit what the arithmetic of
its tensor cores makes of the operands."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from typing import Any

from factors import alpha_of
from kernel_code import built
from sm90_inputs import frame_bytes
from sm100_inputs import BF16, FP32, Operand, emulated, operand, product, rounded

from blockscale import emulator as em
from blockscale import quantize
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch
from blockscale.kernels.common.calls import Operand as Given
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.sm100 import calls as sm100
from blockscale.kernels.sm100.config import Config, choose_config
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

PAIR = {"ctas": 2, "cluster": (2, 1)}
WIDE = {"mma_n": 256, "epilogue_stages": 1}


@cache
def _case(a_format: str, b_format: str, shape: tuple[int, int, int]):
    """Operands, and their product before the epilogue."""
    m, n, k = shape
    a, b = operand(a_format, m, k, 1), operand(b_format, n, k, 2)
    return a, b, product(a, b)


def _check(config: Config, shape: tuple[int, int, int], **how) -> None:
    a, b, sums = _case(config.a_format, config.b_format, shape)
    assert torch.equal(emulated(config, a, b, **how), rounded(sums, to_torch(config.out_dtype)))


FORMATS = {
    ("mxfp8", "mxfp8"): (130, 136, 720),
    ("mxfp8_e5m2", "mxfp8"): (130, 136, 176),
    ("mxfp4", "mxfp4"): (130, 136, 352),
    ("nvfp4", "nvfp4"): (130, 136, 1568),
    ("mxfp8", "mxfp4"): (130, 136, 256),
    ("mxfp4", "mxfp8_e5m2"): (130, 136, 128),
}


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_formats(formats):
    """Tails in all dimensions, K blocks more than stages, one tile and several for a block."""
    config = Config(*formats, BFLOAT16, stages=3)
    _check(config, FORMATS[formats])
    _check(config, (8, 16, 128), completion="eager")
    assert set(frame_bytes(built(config).__cubin__)) == {0}


CLUSTERS = {
    "256 columns, overlapping sums": Config("mxfp8", "mxfp8", BFLOAT16, stages=4, **WIDE),
    "2x1": Config("mxfp8", "mxfp8", BFLOAT16, cluster=(2, 1)),
    "2x2": Config("nvfp4", "nvfp4", BFLOAT16, cluster=(2, 2)),
    "pair": Config("nvfp4", "nvfp4", BFLOAT16, stages=3, **PAIR, **WIDE),
    "pairs 2x2": Config("mxfp8", "mxfp8", BFLOAT16, ctas=2, cluster=(2, 2)),
    "pairs 4x1": Config("mxfp8", "mxfp4", BFLOAT16, ctas=2, cluster=(4, 1)),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters(name):
    """A cluster takes several tiles, of which some lie beside the output."""
    config = CLUSTERS[name]
    shape = (136, config.mma_n + 8, 256)
    _check(config, shape, completion="random")
    assert set(frame_bytes(built(config).__cubin__)) == {0}


MAJORS = {
    "TN": (Config("mxfp8", "mxfp8_e5m2", BFLOAT16, ("mn", "k")), (144, 136, 272)),
    "NN": (Config("mxfp4", "mxfp8", BFLOAT16, ("k", "mn")), (136, 144, 256)),
    "TT, pairs 2x2": (
        Config(
            "mxfp8",
            "mxfp8",
            BFLOAT16,
            ("mn", "mn"),
            **PAIR | WIDE | {"cluster": (2, 2), "stages": 3},
        ),
        (144, 272, 200),
    ),
}


@pytest.mark.parametrize("name", MAJORS)
def test_majors(name):
    """The other dimension is contiguous: several K blocks with a tail, which need not be even."""
    config, shape = MAJORS[name]
    _check(config, shape)
    assert set(frame_bytes(built(config).__cubin__)) == {0}


@pytest.mark.parametrize("seed", range(2))
def test_orders(seed):
    """Of what completes when."""
    config = Config("nvfp4", "nvfp4", BFLOAT16, stages=3, **PAIR, **WIDE)
    how = {"completion": "random", "seed": seed}
    _check(config, (136, 264, 288), **how)


EPILOGUES = {
    "bf16 added": Config("mxfp8", "mxfp8", BFLOAT16, accumulate=True, bias=BFLOAT16, alpha=(0,)),
    "fp32 added": Config("mxfp8", "mxfp8", FLOAT32, accumulate=True, bias=FLOAT32, alpha=(0,)),
    "fp16": Config("mxfp8", "mxfp8", FLOAT16, bias=FLOAT16, alpha=(0, 0)),
    "fp32 one by one": Config(
        "mxfp8", "mxfp8", FLOAT32, accumulate=True, bias=FLOAT16, tma_store=False
    ),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name):
    config, (m, n, k) = EPILOGUES[name], (130, 200, 160)
    if not config.tma_store:
        n = 141
    a, b, sums = _case("mxfp8", "mxfp8", (m, n, k))
    generator = torch.Generator().manual_seed(5)
    alpha = alpha_of(config.alpha, 3e-3)
    assert config.bias is not None
    bias = (100 * torch.randn(n, generator=generator)).to(to_torch(config.bias))
    start = None
    if config.accumulate:
        start = (100 * torch.randn(m, n, generator=generator)).to(to_torch(config.out_dtype))
    got = emulated(config, a, b, start, bias=bias, alpha=alpha)
    want = rounded(sums, to_torch(config.out_dtype), alpha_of(config.alpha[:1], 3e-3), bias, start)
    assert bool(torch.isfinite(want.float()).any())
    assert torch.equal(got, want)


# --- calls ----------------------------------------------------------------------------------------


def _arguments(a: Operand, b: Operand) -> tuple[Given, Given]:
    return Given(a.data, a.scale, a.format), Given(b.data, b.scale, b.format)


def test_call():
    """What the quantizer gives, with both global scales as alpha; K is no multiple of a K block."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 160, generator=generator) for rows in (24, 40))
    a, b = (quantize(t, "nvfp4", layout="tcgen05") for t in (x, w))
    assert a.global_scale is not None
    assert b.global_scale is not None
    alpha = a.global_scale, b.global_scale
    with em.cutedsl(em.Device("sm_100a", completion="late", check="all,exit_stores")):
        left, right = Given(a.data, a.scale, "nvfp4"), Given(b.data, b.scale, "nvfp4")
        got = sm100.gemm(left, right, alpha=alpha, gpu=chip("sm_100a"))
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    bound = want.abs() * 2**-8 + 1e-5 * want.norm()  # rounding to bf16; sums and alpha in fp32
    assert bool(((got.double() - want).abs() <= bound).all())


def test_call_into():
    """Columns of another matrix are added to; no product is nothing to add."""
    a, b, sums = _case("mxfp8", "mxfp8", (8, 16, 128))
    whole = torch.randn(8, 48)
    before = whole.clone()
    with em.cutedsl(em.Device("sm_100a", check="all,exit_stores")):
        c = whole[:, 16:32]
        given = {"out": c, "accumulate": True, "out_dtype": FP32, "gpu": chip("sm_100a")}
        assert sm100.gemm(*_arguments(a, b), **given) is c
    before[:, 16:32] += torch.from_numpy(sums)
    assert torch.equal(whole, before)
    empty = operand("mxfp8", 0, 128, 1)
    assert sm100.gemm(*_arguments(empty, b), gpu=chip("sm_100a")).shape == (0, 16)


def test_call_transposed():
    """Views of transposed matrices, by what the chooser takes for them."""
    a, b, sums = _case("mxfp8", "mxfp8_e5m2", (144, 160, 72))
    views = [x.data.T.contiguous().T for x in (a, b)]
    types = torch.float8_e4m3fn, torch.float8_e5m2
    views = [x.view(dtype) for x, dtype in zip(views, types, strict=True)]
    with em.cutedsl(em.Device("sm_100a", check="all,exit_stores")):
        left, right = Given(views[0], a.scale, "mxfp8"), Given(views[1], b.scale, "mxfp8_e5m2")
        got = sm100.gemm(left, right, gpu=chip("sm_100a"))
    assert torch.equal(got, rounded(sums, BF16))


def _refused(kind: type[Exception], match: str, **changes) -> None:
    a, b, _ = _case("mxfp8", "mxfp8", (8, 16, 128))
    sides = dict(zip("ab", _arguments(a, b), strict=True))
    options: dict[str, Any] = {"gpu": chip("sm_100a")}
    for name, value in changes.items():
        side, _, field = name.partition("_")
        if name in sides:
            sides[name] = Given(value.data, value.scale, value.format)
        elif side in sides:
            sides[side] = sides[side]._replace(**{field: value})
        else:
            options[name] = value
    with pytest.raises(kind, match=match):
        sm100.gemm(*sides.values(), **options)


def test_refused():
    bytes_of = torch.uint8
    _refused(Unsupported, r"sm_100:.*sm_100a and sm_103a", gpu=chip("sm_100"))
    _refused(Unsupported, "sm_90a", gpu=chip("sm_90a"))
    _refused(Unsupported, "nvfp4 with nvfp4", a_format="nvfp4")
    _refused(Unsupported, "out_dtype", out_dtype=torch.float64)
    _refused(ValueError, r"K = 128 and 64", b_data=torch.zeros(16, 64, dtype=bytes_of))
    _refused(ValueError, "a_data: has strides", a_data=torch.zeros(8, 256, dtype=bytes_of)[:, ::2])
    columns = torch.zeros(64, 16, dtype=bytes_of).T
    four = {"b_data": columns, "b_format": "mxfp4"}
    _refused(ValueError, r"b_data: has strides .*: call contiguous\(\)", **four)
    _refused(TypeError, "a_data: got torch.int8", a_data=torch.zeros(8, 128, dtype=torch.int8))
    _refused(ValueError, r"b_scale: has shape \(1024,\)", b_scale=torch.zeros(1024).byte())
    _refused(TypeError, "b_scale: got torch.float32", b_scale=torch.zeros(512))
    _refused(ValueError, "starts 8 bytes", a_scale=torch.zeros(520).byte()[8:])
    _refused(ValueError, "out: has shape", out=torch.zeros(8, 8, dtype=BF16))
    _refused(ValueError, "accumulate: needs out", accumulate=True)
    _refused(ValueError, "bias: has shape", bias=torch.zeros(8))
    rows = torch.zeros(16, 136, dtype=bytes_of)[:, :128]
    _refused(Unsupported, "b_data: TMA wants rows .* of 16 bytes", b_data=rows)
    four = operand("mxfp4", 16, 192, 1)
    eight = operand("mxfp8", 8, 192, 1)
    _refused(Unsupported, "b_data: K = 192; .* multiple of 128: pad", a=eight, b=four)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_chosen(formats, dtype):
    """Every size has a configuration, whose sums and scales Tensor Memory has room for."""
    for shape in ((1, 1, 128), (256, 256, 256), (8192, 8192, 8192)):
        config = choose_config(shape, formats, Epilogue(dtype))
        last = config.scale_columns[1] + 4 * config.scale_rows[1] * config.kind.scale_tiles
        assert last <= 512
        assert config.acc_stride >= config.mma_n - config.early_release * config.subtile_n
        with pytest.raises(ValueError, match="stages"):
            replace(config, stages=12)
