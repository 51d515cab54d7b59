"""``quantize_file``: one checkpoint into another, a chunk of rows at a time."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checks import check_target
from ..formats import Format, formats, get_format
from ..quantize import quantize
from .convention import (
    INPUT_SCALE,
    all_part_names,
    check_names,
    description_of,
    metadata_for,
    part_names,
    parts_of,
    read_descriptions,
)
from .fused import GlobalScales
from .header import TORCH_DTYPES, Header, Stored, build
from .manifest import VERSION, read_manifest, stale_tensors
from .orientation import outputs_last
from .reader import PIECE, Reader
from .selection import reason, select, why_nothing
from .statistics import ErrorStatistics, error_bin_edges
from .writer import Output, beside, locked, tensor_bytes

__all__ = ["CHUNK", "Progress", "chunks", "quantize_file"]

# Elements: enough for eight threads. The reference, where numba is missing, needs some 500 bytes
# for each.
CHUNK = 1 << 21
_ROWS = 128  # chunks start at multiples of it: no block of any format is cut


@dataclass(frozen=True)
class Progress:
    """How far :func:`quantize_file` is: handed to its ``progress``.

    ``bytes`` of ``total_bytes`` of the source are dealt with. ``note`` tells what became of an
    earlier attempt (finished, resumed, or why it was started anew).
    """

    phase: str  # "check" while the source is summed, then "quantize"
    name: str = ""
    tensors: int = 0
    total_tensors: int = 0
    bytes: int = 0
    total_bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class _Plan:
    """What will be made, known from the source's header alone."""

    format: Format
    reasons: Mapping[str, str | None]  # None: quantized; else why it is copied
    head: bytes
    header: Header
    scales: GlobalScales | None  # of formats that have them
    statistics: bool

    @property
    def warnings(self) -> list[str]:
        return self.scales.warnings if self.scales else []

    @property
    def elsewhere(self) -> dict[str, float]:
        return self.scales.elsewhere if self.scales else {}


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format = "mxfp8",
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
    statistics: bool = True,
) -> dict[str, Any]:
    """Quantize the matrices of a safetensors file along their last dimension; copy all else.

    >>> manifest = checkpoint.quantize_file("model.safetensors", "model.mxfp8.safetensors", "mxfp8")
    >>> manifest["tensors"]["layer.weight"]["error"]["sqnr_db"]
    31...

    Memory does not grow with the file or its tensors: they are read, quantized, measured and
    written in chunks of rows. ``target`` appears under its name when it is complete. After a kill,
    the same call goes on where it was; finished tensors are not redone. See docs/checkpoints.md.

    Args:
        source: a safetensors file. float32, bfloat16 and float16 tensors (..., N, K), blocks along
            K as in the weight of a linear layer, are quantized where K is a multiple of the block;
            those that a bias shows to be stored (in, out) are not.
        target: to be made; ``target.manifest.json`` beside it holds checksums and errors.
        format: a name of :data:`blockscale.formats`.
        include: globs of what is quantized, instead of all but
            :data:`~blockscale.checkpoint.DEFAULT_EXCLUDE`.
        exclude: globs of what is not.
        progress: called at each step.
        statistics: measure what is lost, which takes a third to a half of the time.

    Weights that servers fuse get one global scale (:data:`~blockscale.checkpoint.fused.FUSED`); the
    index of a checkpoint of several files, beside ``source``, says where those are.

    Returns:
        The manifest. If ``target`` is there already and is what this call would make, it is
        returned at once.

    Raises:
        ValueError: damaged source, unknown format, a glob that matches nothing, nothing to
            quantize, ``target`` is in the way, or another process writes it.
        OSError: no such file, no room, or the source changed while it was read.
    """
    fmt, target = get_format(format), Path(target)
    if formats.get(fmt.name) != fmt:
        raise ValueError(
            f"format: {fmt.name!r} is not one of blockscale.formats, no file can name it"
        )
    include = (include,) if isinstance(include, str) else tuple(include)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    tell = progress or (lambda event: None)
    with Reader(source, "source") as file:
        plan = _plan(file, fmt, include, exclude, statistics)
        check_target("target", target)
        _check_distinct(file.path, target)
        with locked(target):
            made = read_manifest(target) if os.path.lexists(target) else None
            if made is None and os.path.lexists(target):
                raise _in_the_way(target, "has no manifest")
            identity = {
                "blockscale": _version(),
                "format": fmt.name,
                "include": list(include),
                "exclude": list(exclude),
                "statistics": statistics,
                "elsewhere": plan.elsewhere,
                "source": {"size": file.header.file_size, "sha256": _checksum(file, tell)},
            }
            if made is not None:
                _check_same(target, made, identity, plan.head)
                for name in ".journal", ".partial":  # of a process that was killed at the very end
                    beside(target, name).unlink(missing_ok=True)
                tell(Progress("check", note=f"nothing to do: {target} is finished already"))
                return made
            with Output(target, plan.head, plan.header, identity) as out:
                _write(file, out, plan, tell)
                file.check_unchanged()
                manifest = _manifest(file, out, plan, identity, target)
                out.commit(manifest)
                return manifest


def _version() -> str:
    # looked up, not imported: the package imports far more than checkpoint needs
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def _plan(
    file: Reader,
    format: Format,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    statistics: bool,
) -> _Plan:
    try:
        earlier = read_descriptions(file.header)
    except ValueError as error:
        raise ValueError(f"source: {file.path}: {error}; save it again") from None
    tensors = file.header.tensors
    backwards = outputs_last(file)
    reasons = select(tensors, format, include, exclude, all_part_names(earlier), backwards)
    if None not in reasons.values():
        why = why_nothing(tensors, reasons, backwards)
        raise ValueError(
            f"source: nothing in {file.path} would be quantized to {format.name} ({why[0]}){why[1]}"
        )
    stored: list[tuple[str, str, tuple[int, ...]]] = []
    descriptions = dict(earlier)
    for name, tensor in tensors.items():
        if reasons[name] is not None:
            stored.append((name, tensor.dtype, tensor.shape))
            continue
        descriptions[name] = description_of(format, tensor.shape, TORCH_DTYPES[tensor.dtype])
        names = part_names(name, descriptions[name])
        stored += [(names[part], *what) for part, what in parts_of(format, tensor.shape).items()]
    check_names((name for name, _, _ in stored), "source")
    head, header = build(stored, metadata_for(descriptions, file.header.metadata))
    scales = None
    if format.has_global_scale:
        scales = GlobalScales(
            file, format, reasons, lambda n, t: reason(n, t, format, include, exclude)
        )
    return _Plan(format, reasons, head, header, scales, statistics)


def _check_distinct(source: Path, target: Path) -> None:
    for suffix in ("", ".partial", ".journal", ".lock", ".manifest.json", ".manifest.json.partial"):
        path = beside(target, suffix)
        if path.exists() and path.samefile(source):
            raise ValueError(
                f"target: writing {target} would destroy the source {source}; choose another name"
            )


def _in_the_way(target: Path, why: str) -> ValueError:
    return ValueError(f"target: {target} exists and {why}; remove it, or choose another name")


def _check_same(
    target: Path, made: Mapping[str, Any], identity: Mapping[str, Any], head: bytes
) -> None:
    """ValueError unless ``target`` is the finished result of this very job."""
    for key, value in identity.items():
        old = made.get(key)
        if key == "source" and isinstance(old, dict):
            old = {k: v for k, v in old.items() if k != "name"}
        if old != value:
            raise _in_the_way(target, f"was made with another {key}")
    with Reader(target, "target") as file:
        if stale_tensors(file, made):
            raise _in_the_way(target, "is not what its manifest says")
        if file.header_sha256() != hashlib.sha256(head).hexdigest():
            raise _in_the_way(target, "was made with another choice of tensors")


def _checksum(file: Reader, tell: Callable[[Progress], None]) -> str:
    total, done = file.header.file_size, 0

    def seen(count: int) -> None:
        nonlocal done
        done += count
        tell(Progress("check", file.path.name, bytes=done, total_bytes=total))

    return file.file_sha256(seen)


def _write(file: Reader, out: Output, plan: _Plan, tell: Callable[[Progress], None]) -> None:
    """Every tensor that is not finished, in the order of the source."""
    tensors, done = file.header.tensors, 0
    total = sum(tensor.nbytes for tensor in tensors.values())
    for i, (name, tensor) in enumerate(tensors.items()):

        def report(count: int, name: str = name, i: int = i) -> None:
            nonlocal done
            done += count
            tell(Progress("quantize", name, i, len(tensors), done, total, out.note))

        report(0)
        if name in out.records:
            report(tensor.nbytes)
        elif plan.reasons[name] is None:
            out.finish(name, _quantize(file, out, name, plan, report))
        else:
            out.finish(name, _copy(file, out, name, report))
    tell(Progress("quantize", "", len(tensors), len(tensors), total, total, out.note))


def _copy(file: Reader, out: Output, name: str, report: Callable[[int], None]) -> dict[str, Any]:
    tensor, part = file.header.tensors[name], out.part(name)
    for start in range(0, tensor.nbytes, PIECE):
        count = min(PIECE, tensor.nbytes - start)
        part.write(file.bytes(tensor, start, count))
        report(count)
    return {"sha256": {name: part.sha256()}}


def _quantize(
    file: Reader, out: Output, name: str, plan: _Plan, report: Callable[[int], None]
) -> dict[str, Any]:
    tensor, format = file.header.tensors[name], plan.format
    dtype = TORCH_DTYPES[tensor.dtype]
    stored = part_names(name, description_of(format, tensor.shape, dtype))
    parts = {part: out.part(stored_name) for part, stored_name in stored.items()}
    scalar = None
    if plan.scales is not None:
        scalar = plan.scales[name]
        parts["global_scale"].write(tensor_bytes(scalar))
        parts["input_scale"].write(tensor_bytes(torch.tensor(INPUT_SCALE, dtype=torch.float32)))
    statistics = ErrorStatistics()
    for start, shape in chunks(tensor.shape, format):
        x = file.elements(name, start, math.prod(shape)).view(shape)
        q = quantize(x, format, global_scale=scalar)
        parts["data"].write(tensor_bytes(q.qdata))
        parts["scale"].write(tensor_bytes(q.scale))
        if plan.statistics:
            statistics.add(x, q)
        report(x.numel() * x.itemsize)
    sums = {stored[part]: writer.sha256() for part, writer in parts.items()}
    return {"sha256": sums, **({"error": statistics.to_json()} if plan.statistics else {})}


def chunks(shape: Sequence[int], format: Format) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Cut (..., N, K) into pieces that follow each other in memory and cut no block.

    Yields the first element of each and its shape (matrices, rows, K), about :data:`CHUNK` elements
    of one or more matrices, or one row (of blocks) where that is more.
    """
    matrices, rows, k = math.prod(shape[:-2]), shape[-2], shape[-1]
    if format.block[0] == 1:  # then rows of several matrices may share a chunk
        matrices, rows = 1, matrices * rows
    if rows * k <= CHUNK:
        step = max(1, CHUNK // (rows * k))
        for first in range(0, matrices, step):
            yield first * rows * k, (min(step, matrices - first), rows, k)
        return
    step = CHUNK // (_ROWS * k) * _ROWS
    if not step:  # not even 128 rows
        step = max(CHUNK // k, 1) if format.block[0] == 1 else _ROWS
    for matrix in range(matrices):
        for row in range(0, rows, step):
            yield (matrix * rows + row) * k, (1, min(step, rows - row), k)


def _manifest(
    file: Reader, out: Output, plan: _Plan, identity: Mapping[str, Any], target: Path
) -> dict[str, Any]:
    def entry(name: str, tensor: Stored) -> dict[str, Any]:
        record = out.records[name]
        what = {"dtype": tensor.dtype, "shape": list(tensor.shape), "source_bytes": tensor.nbytes}
        why = plan.reasons[name]
        what |= {"format": plan.format.name} if why is None else {"copied": why}
        nbytes = sum(plan.header.tensors[stored].nbytes for stored in record["sha256"])
        return {**what, "bytes": nbytes, **record}

    return {
        "manifest": VERSION,
        **identity,
        "source": {"name": file.path.name, **identity["source"]},
        "file": {
            "name": target.name,
            "size": plan.header.file_size,
            "header_sha256": out.header_sha256,
        },
        "error_bin_edges": error_bin_edges(),
        **({"input_scale": INPUT_SCALE} if plan.scales is not None else {}),
        "warnings": plan.warnings,
        "tensors": {name: entry(name, tensor) for name, tensor in file.header.tensors.items()},
    }
