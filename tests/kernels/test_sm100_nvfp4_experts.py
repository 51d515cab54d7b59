"""Experts' products on Blackwell, as the NVFP4 mega MoE document has them: each test is named after
a row of it. (Those of weights are in tests/distributed/test_mega_weights.py.)"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from kernel_code import built

import blockscale as bs
from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, UINT8
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm100.config import SCALE_COLUMNS, Config, choose_grouped, why_not
from blockscale.kernels.sm100.kinds import find_kind
from blockscale.kernels.sm100.quantizing_config import Quantizing
from stand_in import emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

#: Activations and weights of experts.
NVFP4, MXFP4 = ("nvfp4", "nvfp4"), ("mxfp8", "mxfp4")


def first_product(formats: tuple[str, str]) -> Config:
    """Of experts, with SwiGLU and what quantizes it."""
    quantizing = Quantizing(formats[0], swiglu=True, rounded=True)
    return choose_grouped((512, 4096, 4096), 8, formats, Epilogue(UINT8), quantizing=quantizing)


def scale_columns(config: Config) -> int:
    """Of Tensor Memory, that the scales of a K block of 128 rows of A take."""
    return config.scale_columns[1] - config.scale_columns[0]


def test_ptx_instruction():
    for formats, kind in ((NVFP4, "mxf4nvf4.block_scale.scale_vec::4X"), (MXFP4, "mxf8f6f4")):
        with em.cutedsl(em.Device("sm_100a")):
            code = built(first_product(formats)).__ptx__
        assert f".kind::{kind}" in code
        assert (".kind::mxf8f6f4" in code) == (formats is MXFP4)
        assert ".target sm_100a" in code


def test_sf_vector_size():
    """block16, four scales of an MMA's row; block32."""
    nvfp4, mxfp4 = find_kind(*NVFP4), find_kind(*MXFP4)
    assert (nvfp4.block, nvfp4.k // nvfp4.block) == (16, 4)
    assert (mxfp4.block, mxfp4.k // mxfp4.block) == (32, 1)


def test_tmem_sf_cols():
    """SF_BLOCK_M / 32 columns, times four, of 128 bytes of a row: 256 E2M1 elements against 128
    E4M3; twice at equal K."""
    nvfp4, mxfp4 = first_product(NVFP4), first_product(MXFP4)
    assert scale_columns(nvfp4) == 128 // 32 * 4
    assert scale_columns(mxfp4) == 128 // 32
    assert (nvfp4.kind.block_k, mxfp4.kind.block_k) == (256, 128)
    assert scale_columns(nvfp4) / 256 == 2 * scale_columns(mxfp4) / 128


def test_utccp_col_stride():
    """Eight columns a 128-element group of NVFP4, four of blocks of 32."""
    for formats, stride in ((NVFP4, 8), (MXFP4, 4)):
        kind = first_product(formats).kind
        copies = kind.scale_tiles * 128 // kind.block_k  # of 128 elements along K
        assert copies * SCALE_COLUMNS == stride


def test_scale_format_constraint():
    """One bit for the scales of A and of B: 0 is UE4M3, 1 is UE8M0."""
    bit = [config.instruction_descriptor >> 23 & 1 for config in map(first_product, (NVFP4, MXFP4))]
    assert bit == [0, 1]
    assert find_kind("nvfp4", "mxfp4") is find_kind("mxfp8", "nvfp4") is None


def test_l1_epilogue():
    """NVFP4's scales of activations are E4M3 without a sign; those of blocks of 32 exponents."""
    x, w = matrix(40, 128), matrix(2 * 128, 128, seed=1).view(2, 128, 128)
    offsets = torch.tensor([9, 40]).int()
    for (activations, weights), scale in ((NVFP4, 2.0), (MXFP4, None)):
        a = bs.quantize(x, activations, layout="tcgen05", offsets=offsets, backend="reference")
        b = bs.quantize(w, weights, backend="reference").mT
        how = {"swiglu": True, "out_dtype": torch.bfloat16, "global_scale": scale}
        with emulated("sm_100a"):
            q = bs.grouped_gemm_quantize(a, b, offsets, activations, backend="kernel", **how)
        blocks = q.dequantize(torch.float32).abs().unflatten(1, (-1, q.format.block_size))
        codes, largest = q.compact_bytes().int(), blocks.amax(-1)
        if scale is None:  # the element of E4M3 that the largest one of a block became
            element = largest / 2.0 ** (codes - 127)
            assert ((element > 208) & (element <= 448)).all()
        else:
            assert len(codes.unique()) > 20
            assert int(codes.max()) < 0x80


def test_arch_flag():
    why = why_not(*NVFP4, BFLOAT16, "sm_100")
    assert "kind::mxf4nvf4 with scale_vec::4X" in why
    assert "not supported on .target 'sm_100'\". Choose sm_100a" in why
    with pytest.raises(ValueError, match="arch"):
        Config(*NVFP4, BFLOAT16, arch="sm_100")
