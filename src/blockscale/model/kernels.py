"""The counts of the kernels that would be launched, from their own configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..checks import choose
from ..dtypes import FLOAT32
from ..formats import get_format
from ..kernels.common.epilogue import Epilogue
from ..kernels.common.gpu import GPUS
from ..kernels.sm90 import bf16_config
from ..kernels.sm90 import config as sm90
from ..kernels.sm90.grouped_config import choose_grouped, supergroup
from ..kernels.sm90.product_config import ROW, ROWS, ProductConfig
from ..kernels.sm100 import config as sm100
from .counts import Launch

__all__ = ["FORMATS", "GROUPED", "hopper_bf16", "hopper_fp8", "launch", "tcgen05"]

Shape = tuple[int, int, int]
_PAIR_CYCLES = 2.5  # of shared memory, measured: a warp reads two scales a thread for eight columns
_FP8_SCALED = 1 + 4 / sm90.BLOCK_K  # bytes of an element with its part of a scale


def _common(config: Any, shape: Shape) -> dict[str, Any]:
    return {
        "shape": shape,
        "tile": config.tile,
        "cluster": config.cluster,
        "stages": config.stages,
        "out_bytes": config.out_dtype.itemsize,
        "accumulate": config.accumulate,
    }


def _hopper(config: ProductConfig, shape: Shape) -> dict[str, Any]:
    return {**_common(config, shape), "group": config.group(*shape[:2]), "split": config.split_k}


def _wgmma_bytes(config: ProductConfig) -> int:
    """Of A and B that the tensor cores read for a K block: each wgmma its rows and columns."""
    rows, columns = config.tile
    return rows // ROWS * (columns // config.mma_n) * (ROWS + config.mma_n) * ROW


def hopper_fp8(config: sm90.Config, shape: Shape) -> Launch:
    """FP8 with scales of 128: a warpgroup's four warps read scales of its rows and columns."""
    rows, columns = config.tile
    each = config.b_block[0] == 1
    reads = columns // 8 * _PAIR_CYCLES if each else config.b_scales
    wavefronts = rows // ROWS * (8 + 4 * reads)
    return Launch(
        unit="fp8",
        block_k=sm90.BLOCK_K,
        shared_bytes=_wgmma_bytes(config) + config.stage_bytes + int(wavefronts * 128),
        operand_bytes=(_FP8_SCALED, _FP8_SCALED if each else 1 + 4 / sm90.BLOCK_K**2),
        **_hopper(config, shape),
    )


def hopper_bf16(config: bf16_config.Bf16Config, shape: Shape) -> Launch:
    """Plain bf16."""
    return Launch(
        unit="bf16",
        block_k=bf16_config.BLOCK_K,
        shared_bytes=_wgmma_bytes(config) + config.stage_bytes,
        operand_bytes=(2, 2),
        **_hopper(config, shape),
    )


def tcgen05(config: sm100.Config, shape: Shape) -> Launch:
    """Block-scaled products of Blackwell. What is loaded is read once: by the tensor cores, or to
    bring scales to Tensor Memory. A tile is stored while the next one is multiplied, as far as
    Tensor Memory has room for both."""
    return Launch(
        unit="fp4" if config.kind.packed else "fp8",
        block_k=config.kind.block_k,
        shared_bytes=2 * config.stage_bytes,
        operand_bytes=(_stored_bytes(config.a_format), _stored_bytes(config.b_format)),
        exposed=0.0 if config.acc_stages > 1 else config.early_release / config.subtiles,
        **_common(config, shape),
        group=config.group,
    )


def _stored_bytes(name: str) -> float:
    """Of an element, with its part of a scale."""
    fmt = get_format(name)
    return fmt.element.bits / 8 + fmt.scale.nbytes / fmt.block_size


# --- what is launched for a product ---------------------------------------------------------------


def _fp8_block(shape: Shape, ctas: int | None) -> Launch:
    return hopper_fp8(sm90.choose_config(shape, Epilogue()), shape)


def _fp8_1x128(shape: Shape, ctas: int | None) -> Launch:
    """Added to fp32, as for the gradient of a weight."""
    added = Epilogue(FLOAT32, accumulate=True)
    return hopper_fp8(sm90.choose_config(shape, added, b_block=(1, 128)), shape)


def _bf16(shape: Shape, ctas: int | None) -> Launch:
    return hopper_bf16(bf16_config.choose_config(shape, Epilogue()), shape)


def _blackwell(a_format: str, b_format: str) -> Callable[[Shape, int | None], Launch]:
    def build(shape: Shape, ctas: int | None) -> Launch:
        formats = a_format, b_format
        return tcgen05(sm100.choose_config(shape, formats, Epilogue(), ctas=ctas), shape)

    return build


#: By architecture and name of what is multiplied.
FORMATS: Mapping[str, Mapping[str, Callable[[Shape, int | None], Launch]]] = MappingProxyType(
    {
        "sm_90a": {"fp8_block": _fp8_block, "fp8_1x128": _fp8_1x128, "bf16": _bf16},
        "sm_100a": {
            "mxfp8": _blackwell("mxfp8", "mxfp8"),
            "mxfp8_mxfp4": _blackwell("mxfp8", "mxfp4"),
            "mxfp4": _blackwell("mxfp4", "mxfp4"),
            "nvfp4": _blackwell("nvfp4", "nvfp4"),
        },
    }
)


def _fp8_block_groups(shape: Shape, ctas: int | None, groups: int) -> Launch:
    config = choose_grouped(shape, groups, Epilogue())
    made = hopper_fp8(config, shape)
    return replace(made, group=supergroup(config.tile, shape[2], GPUS["sm_90a"].multiprocessors))


def _blackwell_groups(a_format: str, b_format: str) -> Callable[[Shape, int | None, int], Launch]:
    def build(shape: Shape, ctas: int | None, groups: int) -> Launch:
        m, n, k = shape
        each, formats = (-(-m // groups), n, k), (a_format, b_format)
        config = sm100.choose_grouped(each, groups, formats, Epilogue(), ctas=ctas)
        return replace(tcgen05(config, shape), group=sm100.supergroup(config, GPUS["sm_100a"]))

    return build


#: The same, of what is multiplied in groups of rows.
GROUPED: Mapping[str, Mapping[str, Callable[[Shape, int | None, int], Launch]]] = MappingProxyType(
    {
        "sm_90a": {"fp8_block": _fp8_block_groups},
        "sm_100a": {
            "mxfp8": _blackwell_groups("mxfp8", "mxfp8"),
            "mxfp8_mxfp4": _blackwell_groups("mxfp8", "mxfp4"),
            "mxfp4": _blackwell_groups("mxfp4", "mxfp4"),
            "nvfp4": _blackwell_groups("nvfp4", "nvfp4"),
        },
    }
)


def launch(
    arch: str,
    format: str,
    shape: Shape,
    *,
    group: int | None = None,
    ctas: int | None = None,
    groups: tuple[int, ...] = (),
) -> Launch:
    """What ``bs.gemm`` would launch for a product of ``shape`` (M, N, K), bf16 out; or
    ``bs.grouped_gemm`` for ``groups`` of so many rows, M in all.

    Args:
        arch: "sm_90a" or "sm_100a".
        format: a key of ``FORMATS[arch]``.
        group: clusters down that are taken before the next ones across; 1 is no supergroups.
        ctas: CTAs whose tensor cores work together, 1 or 2; sm_100a alone.
        groups: of rows; format is then a key of ``GROUPED[arch]``.
    """
    choose("arch", arch, FORMATS)
    choose("format", format, FORMATS[arch])
    if ctas is not None and (arch != "sm_100a" or ctas not in (1, 2)):
        raise ValueError(f"ctas: got {ctas} for {arch}; choose 1 or 2, for sm_100a")
    if groups:
        choose("format (of groups)", format, GROUPED[arch])
        found = replace(GROUPED[arch][format](shape, ctas, len(groups)), groups=groups)
    else:
        found = FORMATS[arch][format](shape, ctas)
    return found if group is None else replace(found, group=group)
