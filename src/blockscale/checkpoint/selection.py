"""Which tensors of a file are quantized, and why the others are not."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from fnmatch import fnmatchcase

from ..exclusions import GLOBS, why_left_alone
from ..formats import Format
from .header import Stored, show
from .orientation import remedy

__all__ = ["DEFAULT_EXCLUDE", "reason", "select", "why_nothing"]

#: Globs of matrices that are left as they are unless ``include`` names them, matched in lower case.
#: Embeddings are looked up, not multiplied; the head and routers are small and cost most accuracy
#: (peers keep all of these in high precision too); a bias or another library's scale is no weight.
#: The same layers are left alone in models: :data:`blockscale.nn.DEFAULT_EXCLUDE`.
DEFAULT_EXCLUDE = GLOBS

_ALREADY = "quantized already"
_QUANTIZABLE = ("F32", "BF16", "F16")


def obstacle(tensor: Stored, format: Format) -> str | None:
    """Why a tensor cannot be quantized in blocks along its last dimension; None if it can."""
    if tensor.dtype not in _QUANTIZABLE:
        return f"{tensor.dtype}; only {', '.join(_QUANTIZABLE)} are quantized"
    if len(tensor.shape) < 2:
        return "not a matrix"
    if not tensor.numel:
        return "empty"
    if tensor.shape[-1] % format.block_size:
        return (
            f"last dimension {tensor.shape[-1]} is not a multiple of {format.name}'s block of "
            f"{format.block_size}"
        )
    return None


def select(
    tensors: Mapping[str, Stored],
    format: Format,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    quantized: Collection[str] = (),
    backwards: Collection[str] = (),
    gated: Container[str] = (),
) -> dict[str, str | None]:
    """For each tensor None if it is quantized, else the reason why it is copied.

    Args:
        tensors: of the file.
        format: that is asked for.
        include: globs (``*`` also matches dots), or names; without them every matrix that can be
            quantized is, except :data:`DEFAULT_EXCLUDE`.
        exclude: globs of tensors that are not, whatever ``include`` says.
        quantized: names of what is part of a quantized tensor already.
        backwards: names of what is stored (in, out).
        gated: names of :func:`blockscale.exclusions.gated_by`; a ``gate`` beside one is no router.

    Raises ValueError for a glob that matches nothing or nothing that can be quantized, and for a
    name in ``include`` that cannot be.
    """
    obstacles = {
        name: _ALREADY
        if name in quantized
        else obstacle(tensor, format) or (remedy(tensor) if name in backwards else None)
        for name, tensor in tensors.items()
    }
    for pattern in include:
        matches = _matches("include", pattern, tensors)
        able = [name for name in matches if obstacles[name] is None]
        if not able:
            raise ValueError(
                f"include: {show(matches[0])} cannot be quantized to {format.name} "
                f"({obstacles[matches[0]]}), nor can anything else that {pattern!r} matches; leave "
                "it out, or name another"
            )
    for pattern in exclude:
        _matches("exclude", pattern, tensors)

    return {
        name: why or _left_out(name, include, exclude, gated) for name, why in obstacles.items()
    }


def why_nothing(
    tensors: Mapping[str, Stored], reasons: Mapping[str, str | None], backwards: Collection[str]
) -> tuple[str, str]:
    """The reason that tells most where all are copied, and what to do where it does not say."""
    if _ALREADY in reasons.values():
        return _ALREADY, "; pass the file in high precision, or choose more of this with include"
    matrices = {name: why for name, why in reasons.items() if len(tensors[name].shape) > 1}
    told = [why for name, why in matrices.items() if name in backwards]
    if told:
        return str(told[0]), ""
    why = next(iter(matrices.values()), "it has no matrix")
    return str(why), "; choose with include, or another format"


def reason(
    name: str,
    tensor: Stored,
    format: Format,
    include: Sequence[str],
    exclude: Sequence[str],
    gated: Container[str],
) -> str | None:
    """What :func:`select` says of one tensor that is not quantized yet."""
    return obstacle(tensor, format) or _left_out(name, include, exclude, gated)


def _left_out(
    name: str, include: Sequence[str], exclude: Sequence[str], gated: Container[str]
) -> str | None:
    if hit := _first(exclude, name):
        return f"excluded by {hit!r}"
    if include:
        return None if _first(include, name) else "not included"
    return why_left_alone(name, gated) or None


def _matches(argument: str, pattern: str, names: Collection[str]) -> list[str]:
    found = [name for name in names if _fits(pattern, name)]
    if not found:
        some = ", ".join(show(name) for name in list(names)[:3])
        raise ValueError(
            f"{argument}: {pattern!r} matches none of the {len(names)} tensors; `blockscale "
            f"inspect` lists them{f' ({some}, ...)' if some else ''}"
        )
    return found


def _first(patterns: Sequence[str], name: str) -> str | None:
    return next((p for p in patterns if _fits(p, name)), None)


def _fits(pattern: str, name: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
