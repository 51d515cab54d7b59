"""The block-scaled instructions of Blackwell's tensor cores, and which formats each multiplies.

PTX ISA, tcgen05.mma: kinds, K of an instruction, scales of a row (.scale_vec), and the codes that
an instruction descriptor has for elements and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["KINDS", "Kind", "find_kind"]

K_STEPS = 4  # MMAs of a K block: 128 bytes of a row in shared memory, 32 each
TILE_SCALES = 4  # scales of a row in a tile of layout "tcgen05"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tcgen05.mma with block scaling.

    Attributes:
        name: PTX's name of the kind and of its scales.
        k: the elements of a row that an MMA multiplies.
        block: the elements that share a scale.
        packed: shared memory has two elements a byte; else one, of 4 bits too.
        scale: the bit of the scales' type in the instruction descriptor.
        codes: the codes of element formats in the instruction descriptor.
    """

    name: str
    k: int
    block: int
    packed: bool
    scale: int
    codes: Mapping[str, int]

    @property
    def block_k(self) -> int:
        """The elements of a row in a K block."""
        return K_STEPS * self.k

    @property
    def scale_tiles(self) -> int:
        """The tiles of scales along K of a K block."""
        return self.block_k // (self.block * TILE_SCALES)

    def scale_place(self, step: int) -> tuple[int, int]:
        """Where an MMA's scales are: the tile along K, and the first byte of a row in it."""
        return divmod(step * (self.k // self.block), TILE_SCALES)


def _codes(**codes: int) -> Mapping[str, int]:
    return MappingProxyType(codes)


_UE4M3, _UE8M0 = 0, 1

#: The first one that takes both formats is used.
KINDS = (
    Kind("mxf4.block_scale.scale_vec::2X", 64, 32, True, _UE8M0, _codes(mxfp4=1)),
    Kind("mxf4nvf4.block_scale.scale_vec::4X", 64, 16, True, _UE4M3, _codes(nvfp4=1)),
    Kind(
        "mxf8f6f4.block_scale.scale_vec::1X",
        32,
        32,
        False,
        _UE8M0,
        _codes(mxfp8=0, mxfp8_e5m2=1, mxfp4=5),
    ),
)


def find_kind(a_format: str, b_format: str) -> Kind | None:
    """The kind that multiplies two formats, if there is one."""
    found = (kind for kind in KINDS if a_format in kind.codes and b_format in kind.codes)
    return next(found, None)
