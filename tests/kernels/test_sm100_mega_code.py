"""A mega MoE for Blackwell as machine code, and what of it seed sizes decide."""

from unittest.mock import patch

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from blockscale.emulator import Device, cutedsl
from blockscale.emulator.host.hostcode import settings
from blockscale.kernels.common.builders import build_kernel
from blockscale.kernels.common.gpu import SHARED
from blockscale.kernels.common.machine_code import usage
from blockscale.kernels.mega.buffers import Sizes
from blockscale.kernels.sm100.config import SCALE_COLUMNS, TMEM_COLUMNS
from blockscale.kernels.sm100.mega_config import MegaConfig, choose_mega


def config(weights: str, activations: str, ctas: int, ranks: int = 8) -> MegaConfig:
    alphas = ((0, 1), (0, 1)) if weights == "nvfp4" else ((), ())
    sizes = Sizes(ranks, 8192, 6, 4096, 2048, 256 // ranks, activations)
    return choose_mega(sizes, weights, alphas=alphas, ctas=ctas)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("formats", [("nvfp4", "nvfp4"), ("mxfp4", "mxfp8")], ids=str)
def test_nothing_is_spilled(formats, ctas):
    chosen = config(*formats, ctas)
    with cutedsl(Device("sm_100a")), patch.object(settings(), "keep_cubin", True):
        found = usage(build_kernel(chosen).__cubin__)
    assert found.frame_bytes == 0
    assert found.registers * chosen.threads <= 65536
    assert chosen.shared_bytes + found.static_bytes <= SHARED


def test_columns_of_tensor_memory():
    """Scales of A and of B: ``SF_BLOCK_M / 32 * 4`` of NVFP4, a quarter of it of MXFP4 by MXFP8,
    for 128 bytes of a row: which are 256 elements of the one and 128 of the other."""
    for formats, each, elements in ((("nvfp4", "nvfp4"), 4, 256), (("mxfp4", "mxfp8"), 1, 128)):
        up = config(*formats, 2).up
        assert up.kind.block_k == elements
        columns = [rows * up.kind.scale_tiles * SCALE_COLUMNS for rows in up.scale_rows]
        assert columns == [128 // 32 * each, 256 // 32 * each]
        assert up.scale_columns[1] + columns[1] <= TMEM_COLUMNS
