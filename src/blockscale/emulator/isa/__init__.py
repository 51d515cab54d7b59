"""The instructions, one family a file; importing this package registers all of them."""

from . import access, barrier, control, convert, floating, integer, warp
from .registry import build, families

__all__ = [
    "access",
    "barrier",
    "build",
    "control",
    "convert",
    "families",
    "floating",
    "integer",
    "warp",
]
