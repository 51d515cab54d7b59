"""What choosers take the GPUs to be that kernels are compiled for, and what is said of others."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["MULTIPROCESSORS", "SHARED", "no_kernels"]

#: Of an H100 SXM and of an H200; of a B200; of a B300.
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}

#: Bytes of shared memory that a CTA may have, or several of a multiprocessor together.
SHARED = 227 << 10

# What products need of an architecture's own features, and what ptxas of CUDA 13.0 says of their
# PTX, by target.
_WGMMA = "FP8 products (wgmma)"
_TCGEN05 = "block-scaled products (tcgen05.mma of kind::mxf4nvf4 with scale_vec::4X, and its like)"
_LOCKED = {
    r"sm_90": (_WGMMA, "Instruction 'wgmma.fence'"),
    r"sm_10[03]": (_TCGEN05, "Feature '.cta_group::1'"),
    r"sm_10[03]f": (_TCGEN05, "Feature '.scale_vec::4X'"),
}
_LETTER = (
    "{what} are features of the architecture-specific target, {own}. The chip has them, and the "
    'letter a unlocks them: without it ptxas stops with "{missing} not supported on .target '
    "'{arch}'\". Choose {own}"
)


def no_kernels(arch: str, known: Iterable[str], what: str = "kernels are compiled for") -> str:
    """Why there is nothing for ``arch``, though there is for those ``known``, and what to do."""
    *most, last = known
    text = f"{what} {', '.join(most)} and {last}"
    own = f"{arch.rstrip('af')}a"
    for pattern, (needed, missing) in _LOCKED.items():
        if re.fullmatch(pattern, arch) and own in (*most, last):
            return f"{text}; {_LETTER.format(what=needed, missing=missing, arch=arch, own=own)}"
    if re.fullmatch(r"sm_12\d[af]?", arch):
        return f"{text}; a GPU of this name has neither tcgen05 nor Tensor Memory"
    return text
