"""What a call of the product needs, found once for all calls alike: its kernel and its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import Format, get_format
from ...layouts import TILE_ROWS, get_layout
from ...memory import as_bytes
from ..common.calls import CompiledGemm, GemmCall, check_matrix
from ..common.gpu import Unsupported
from ..common.runtime import Described
from ..common.template import template
from .config import EIGHT_BIT, Config, choose_config, why_not

__all__ = ["Operands", "plan_gemm", "views"]

_NAMES = ("a_data", "b_data")
_UNPACKED = 128  # elements of 4 bits that TMA unpacks at once


@dataclass(frozen=True, slots=True)
class Operands:
    """A and B, found to belong together.

    Attributes:
        stored: how each lies in memory.
        majors: which dimension of each is contiguous: "k" or "mn".
        shape: M, N, K.
        scale_tiles: of 128 rows, down the scales of each.
    """

    stored: tuple[Described, Described]
    majors: tuple[str, str]
    shape: tuple[int, int, int]
    scale_tiles: tuple[int, int]

    @classmethod
    def of(
        cls, call: GemmCall, parts: tuple[int, int] = (1, 1), a_scale_rows: int | None = None
    ) -> Operands:
        """Check those of a call; raises as ``gemm`` does. A and B have ``parts``, each with its own
        tiles of scales; or A has tiles for as many rows as it says."""
        (a, a_scale, a_format), (b, b_scale, b_format) = call.a, call.b
        assert a_format is not None
        assert b_format is not None
        assert a_scale is not None
        assert b_scale is not None
        formats = get_format(a_format), get_format(b_format)
        majors = _major(a, a_format), _major(b, b_format)
        stored = tuple(
            x if major == "k" else _transposed(x) for x, major in zip((a, b), majors, strict=True)
        )
        for name, data, format in zip(_NAMES, stored, formats, strict=True):
            check_matrix(name, data, _dtypes(format.element.dtype))
        pairs = zip((a, b), formats, strict=True)
        depths = [x[0][1] * (8 // each.element.bits) for x, each in pairs]
        if depths[0] != depths[1]:
            raise ValueError(
                f"a_data, b_data: got {tuple(a[0])} of {a_format} and {tuple(b[0])} of {b_format}, "
                f"so K = {depths[0]} and {depths[1]}; expected (M, K) and (N, K), two elements of "
                "4 bits in a byte"
            )
        m, n, k = a[0][0], b[0][0], depths[0]
        tiles = tiles_down(a_scale_rows or m, parts[0]), tiles_down(n, parts[1])
        _check_scale("a_scale", a_scale, tiles[0], k, formats[0])
        _check_scale("b_scale", b_scale, tiles[1], k, formats[1])
        return cls((stored[0], stored[1]), majors, (m, n, k), tiles)

    @property
    def views(self) -> Callable[..., list[Tensor]]:
        """How kernels take data and scales of these."""
        return partial(views, majors=self.majors, scale_tiles=self.scale_tiles)

    def check_loadable(self, config: Config) -> None:
        """Raise Unsupported where TMA cannot load one."""
        for name, data, unpacked in zip(_NAMES, self.stored, config.unpacked, strict=True):
            _check_loadable(name, data, self.shape[2] if unpacked else 0)


@lru_cache(maxsize=4096)
def plan_gemm(call: GemmCall, ctas: int | None = None) -> CompiledGemm:
    """The plan of a call of ``gemm``; raises as it does."""
    formats = call.a.format, call.b.format
    gpu = call.supported(partial(why_not, *formats, from_torch(call.out_dtype)))
    operands = Operands.of(call)
    m, n, k = operands.shape
    call.check_rest((m, n))
    like = template((m, n), call.out_dtype, call.device)
    if 0 in (m, n, k):
        return CompiledGemm(None, None, like, views)
    config = choose_config(
        (m, n, k),
        formats,
        call.epilogue(n),
        majors=operands.majors,
        gpu=gpu,
        ctas=ctas,
    )
    operands.check_loadable(config)
    return CompiledGemm(config, gpu.load(config), like, operands.views, (None, None))


def views(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    majors: tuple[str, str],
    scale_tiles: tuple[int, int],
) -> list[Tensor]:
    """Data as bytes, matrices of groups below each other, transposed where ``majors`` says "mn",
    each with its scales as rows of tiles: as kernels take them."""
    found = []
    for x, scale, major, rows in zip((a, b), (a_scale, b_scale), majors, scale_tiles, strict=True):
        octets = as_bytes(x).flatten(0, -2)
        found += [octets if major == "k" else octets.T, scale.view(torch.int64).view(rows, -1)]
    return found


def _dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that data may have: this one, or its bytes."""
    return (torch.uint8,) if dtype == torch.uint8 else (dtype, torch.uint8)


def _major(x: Described, format: str) -> str:
    """Which dimension is contiguous, of those that the tensor cores take."""
    shape, stride = x[:2]
    other = len(shape) == 2 and stride[1] != 1 and stride[0] == 1 and format in EIGHT_BIT
    return "mn" if other else "k"


def _transposed(x: Described) -> Described:
    shape, stride, dtype, address = x
    return torch.Size(shape[::-1]), stride[::-1], dtype, address


def tiles_down(rows: int, parts: int = 1) -> int:
    """Tiles of scales down so many rows, of which each of the ``parts`` begins with a tile."""
    return parts * -(-rows // parts // TILE_ROWS)


def _check_scale(name: str, x: Described, tiles: int, k: int, format: Format) -> None:
    wanted = get_layout("tcgen05").stored_shape((tiles * TILE_ROWS, -(-k // format.block[1])))
    dtypes = _dtypes(format.scale.dtype)
    if x[2] not in dtypes:
        raise TypeError(f"{name}: got {x[2]}; expected {' or '.join(map(str, dtypes))}")
    if tuple(x[0]) != wanted or (x[1] != (1,) and wanted > (1,)):
        raise ValueError(
            f"{name}: has shape {tuple(x[0])} and strides {x[1]}; expected {wanted}, contiguous: "
            f'those of {format.name} in layout "tcgen05", {tiles} tiles down and K = {k}; halves '
            "and groups begin with tiles of their own"
        )
    off = x[3] % 16
    if off:
        raise ValueError(
            f"{name}: starts {off} bytes after a multiple of 16, which TMA wants: call clone()"
        )


def _check_loadable(name: str, x: Described, k: int) -> None:
    """Raise Unsupported where TMA cannot load data. ``k`` is that of 4-bit elements which TMA
    unpacks, or 0."""
    apart = 32 if k else 16
    if x[3] % apart or x[1][0] % apart:
        raise Unsupported(f"{name}: TMA wants rows that start at a multiple of {apart} bytes")
    if k % _UNPACKED:
        raise Unsupported(
            f"{name}: K = {k}; beside 8-bit elements TMA loads 4-bit ones where K is a multiple "
            f"of {_UNPACKED}: pad K with zeros"
        )
