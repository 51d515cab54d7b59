"""What a .target may use: PTX ISA 11.1.2."""

from __future__ import annotations

import re

__all__ = ["has"]


def has(own: str, wanted: str) -> bool:
    """Whether PTX for ``own`` may use what needs ``wanted``."""
    have, need = (re.fullmatch(r"sm_(\d+)([af]?)", name) for name in (own, wanted))
    if have is None or need is None:
        return False
    number, least, letter = int(have[1]), int(need[1]), have[2]
    return {
        "": number >= least,
        "f": letter != "" and number // 10 == least // 10 and number >= least,
        "a": letter == "a" and number == least,
    }[need[2]]
