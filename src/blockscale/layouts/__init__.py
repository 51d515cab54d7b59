"""Scale layouts as values: where scale (row, block) lies in memory. See docs/layouts.md."""

from collections.abc import Mapping
from types import MappingProxyType

from ..checks import choose
from .base import Layout, as_bytes
from .compact import Compact
from .grouped import Grouped
from .scales import swizzle_scale, unswizzle_scale
from .sm90 import Packed, Sm90
from .tcgen05 import TILE_BLOCKS, TILE_BYTES, TILE_ROWS, Tcgen05

__all__ = [
    "TILE_BLOCKS",
    "TILE_BYTES",
    "TILE_ROWS",
    "Compact",
    "Grouped",
    "Layout",
    "Packed",
    "Sm90",
    "Tcgen05",
    "as_bytes",
    "get_layout",
    "layouts",
    "swizzle_scale",
    "unswizzle_scale",
]

layouts: Mapping[str, Layout] = MappingProxyType(
    {layout.name: layout for layout in (Compact(), Tcgen05(), Sm90(), Packed())}
)

#: Names of those in which groups of rows begin with tiles of their own.
SPREADING = frozenset(layout.name for layout in layouts.values() if layout.spreads)


def get_layout(layout: str | Layout) -> Layout:
    """Look a layout up by name; a :class:`Layout` is passed through. ValueError if unknown."""
    return layout if isinstance(layout, Layout) else choose("layout", layout, layouts)
