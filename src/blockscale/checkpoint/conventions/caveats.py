"""What a reader of a convention gets wrong of weights that it should read, to be told beforehand.

Found with transformers 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["EXPERT", "Made", "compressed_experts", "no_caveats", "rows_of_equal_blocks"]

#: Name of a weight -> its format and its shape.
Made = Mapping[str, tuple[str, Sequence[int]]]

EXPERT = re.compile(r"\.experts\.\d+\.")

#: Format -> what transformers does with experts in compressed-tensors, and what to write for it.
_EXPERTS = {
    "nvfp4": ("drops the global scales of", "format mxfp4"),
    "mxfp8": ("cannot load", "convention 'fine-grained'"),
    "fp8_128x128": ("cannot load", "convention 'deepseek'"),
}


def no_caveats(made: Made) -> list[str]:
    """All are read right, as far as is known."""
    return []


def compressed_experts(made: Made) -> list[str]:
    """``CompressedTensorsDequantize`` broadcasts scales of blocks, and knows no global ones."""
    formats = dict.fromkeys(format for name, (format, _) in made.items() if EXPERT.search(name))
    return [
        f"transformers {_EXPERTS[format][0]} experts in {format} of compressed-tensors; for it "
        f"choose {_EXPERTS[format][1]}"
        for format in formats
        if format in _EXPERTS
    ]


def rows_of_equal_blocks(made: Made) -> list[str]:
    """``Fp8Dequantize`` takes the number of rows over that of scales for the height of a block."""
    names = [name for name, (_, shape) in made.items() if shape[-2] > 128 and shape[-2] % 128]
    if not names:
        return []
    rows = made[names[0]][1][-2]
    return [
        f"{len(names)} weights ({names[0]!r:.80}: {rows} rows, ...) have no multiple of 128 rows: "
        "where transformers dequantizes, as on a CPU, it takes their blocks for equal, and values "
        "are wrong or an error; --exclude them for it, or choose 'compressed-tensors' for dense "
        "models"
    ]
