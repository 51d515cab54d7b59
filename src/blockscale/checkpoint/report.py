"""``inspect_file``, ``inspect_folder``: what checkpoints hold, and what quantization did to it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .files import Files
from .folders import read_config
from .header import TORCH_DTYPES, Stored, show
from .manifest import read_manifest, stale_tensors
from .reader import Reader
from .reading import descriptions_of
from .statistics import ErrorStatistics, ValueStatistics
from .storage import Description, part_names
from .tasks import CHUNK, pieces

__all__ = ["FileReport", "TensorReport", "inspect_file", "inspect_folder"]

_FLOATS = ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class TensorReport:
    """One tensor; all parts of a quantized one together.

    ``format`` is a name of :data:`blockscale.formats`, or the dtype in the file. ``bf16_bytes`` is
    what the values would take in bfloat16 (integers: what they take). ``error`` is known for
    quantized tensors with an intact manifest or a source, ``values`` in unquantized files.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    bf16_bytes: int
    quantized: bool
    stale: bool = False
    note: str = ""
    error: ErrorStatistics | None = None
    values: ValueStatistics | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON without what is not known."""
        out = {**asdict(self), "shape": list(self.shape)}
        out |= {key: v.to_json() for key in ("error", "values") if (v := getattr(self, key))}
        return {key: value for key, value in out.items() if value not in (None, "")}


@dataclass(frozen=True)
class FileReport:
    """A file, or a folder, and its tensors.

    ``manifest`` is ``"intact"`` (all checksums match), ``"stale"`` (some do not: then ``stale``
    names the stored tensors), ``"missing"``, or ``"none"`` for a file with nothing quantized, which
    needs none. ``measured`` tells where the errors come from: "manifest", "source" or "".
    """

    path: Path
    nbytes: int
    manifest: str
    measured: str
    tensors: tuple[TensorReport, ...]
    stale: tuple[str, ...] = ()

    @property
    def bf16_bytes(self) -> int:
        """What all tensors would take with bfloat16 for all floating-point values."""
        return sum(t.bf16_bytes for t in self.tensors)

    def errors_by_format(self) -> dict[str, ErrorStatistics]:
        """Sums over all tensors of each format whose errors are known."""
        out: dict[str, ErrorStatistics] = {}
        for tensor in self.tensors:
            if tensor.error is not None:
                out.setdefault(tensor.format, ErrorStatistics()).merge(tensor.error)
        return out

    def to_json(self) -> dict[str, Any]:
        """JSON: the report, with totals."""
        quantized = [t for t in self.tensors if t.quantized]
        return {
            "path": str(self.path),
            "manifest": self.manifest,
            "stale": list(self.stale),
            "measured": self.measured,
            "totals": {
                "bytes": self.nbytes,
                "bf16_bytes": self.bf16_bytes,
                "tensors": len(self.tensors),
                "quantized": len(quantized),
                "quantized_bytes": sum(t.nbytes for t in quantized),
                "quantized_bf16_bytes": sum(t.bf16_bytes for t in quantized),
            },
            "formats": {name: error.to_json() for name, error in self.errors_by_format().items()},
            "tensors": [t.to_json() for t in self.tensors],
        }


def inspect_file(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> FileReport:
    """Report on a safetensors file, quantized or not, in constant memory.

    >>> report = checkpoint.inspect_file("model.mxfp8.safetensors")
    >>> report.manifest, report.bf16_bytes / report.nbytes
    ('intact', 1.9...)

    Errors are those that the manifest recorded, for tensors whose checksums still match. With
    ``source``, the file that was quantized, they are measured again.

    Args:
        path: of the file. In one without quantized tensors values are surveyed instead.
        source: optional, the file it was made from.
        progress: called with the name of the tensor at hand, its number and their count.

    Raises:
        ValueError: a damaged file, or a source that does not have the same tensors.
        OSError: a file that cannot be read.
    """
    with Files(path) as files:
        if files.is_folder:
            raise IsADirectoryError(f"path: {path} is a directory; give it to inspect_folder")
        return _inspect(files, source, progress or (lambda name, done, total: None))


def inspect_folder(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> FileReport:
    """Report on all files of a folder together, as :func:`inspect_file` does on one.

    >>> report = checkpoint.inspect_folder("DeepSeek-V3")
    >>> report.manifest, [tensor.format for tensor in report.tensors]
    ('intact', ['fp8_128x128'])

    Folders that others quantized are shown as well; of these no errors are known without the
    ``source``, a folder in high precision. Raises as :func:`inspect_file`.
    """
    if not os.path.isdir(path):
        raise NotADirectoryError(f"path: {path} is no directory; give a file to inspect_file")
    with Files(path) as files:
        return _inspect(files, source, progress or (lambda name, done, total: None))


def _inspect(
    files: Files, source: str | os.PathLike[str] | None, tell: Callable[[str, int, int], None]
) -> FileReport:
    nbytes = sum(files.file(name).header.file_size for name in files.names)
    descriptions = descriptions_of(files, read_config(files, "path"), "path")
    count, tensors = len(files.tensors), list[TensorReport]()
    if not descriptions:
        if source is not None:
            raise ValueError(
                f"source: {files.path} has no quantized tensors to compare with it; leave it out"
            )
        for i, (name, stored) in enumerate(files.tensors.items()):
            tell(name, i, count)
            tensors.append(_survey(files.holder(name), name, stored))
        return FileReport(files.path, nbytes, "none", "", tuple(tensors))

    missing, stale, recorded = False, dict[str, None](), dict[str, Any]()
    for name in files.names:
        file = files.file(name)
        manifest = read_manifest(file.path)
        missing = missing or manifest is None
        if manifest is not None:
            stale |= dict.fromkeys(stale_tensors(file, manifest))
            recorded |= manifest["tensors"]
    parts = part_names(descriptions)
    for i, name in enumerate(sorted(descriptions.keys() | files.tensors.keys())):
        tell(name, i, count)
        if name in descriptions:
            tensors.append(_quantized(files, name, descriptions[name], recorded, stale))
        elif name not in parts:
            why = recorded.get(name, {}).get("copied", "")
            stored = files.tensors[name]
            tensors.append(_plain(name, stored, note=str(why), stale=name in stale))
    if source is not None:
        with Files(source, "source") as originals:
            for i, tensor in enumerate(tensors):
                tell(tensor.name, i, count)
                if tensor.quantized:
                    description = descriptions[tensor.name]
                    tensors[i] = _measured(files, originals, tensor, description)
    state = "stale" if stale else "missing" if missing else "intact"
    measured = "source" if source is not None else "manifest" if recorded else ""
    return FileReport(files.path, nbytes, state, measured, tuple(tensors), tuple(stale))


def _plain(name: str, stored: Stored, **more: Any) -> TensorReport:
    is_float = stored.dtype in (*_FLOATS, "F64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")
    nbytes = stored.nbytes
    wide = 2 * stored.numel if is_float else nbytes
    return TensorReport(name, stored.dtype, stored.shape, nbytes, wide, False, **more)


def _survey(file: Reader, name: str, stored: Stored) -> TensorReport:
    if stored.dtype not in _FLOATS:
        return _plain(name, stored)
    values = ValueStatistics()
    for start in range(0, stored.numel, CHUNK):
        values.add(file.elements(name, start, min(CHUNK, stored.numel - start)))
    return _plain(name, stored, values=values)


def _quantized(
    files: Files,
    name: str,
    description: Description,
    recorded: Mapping[str, Any],
    stale: Collection[str],
) -> TensorReport:
    stored = description.names(name).values()
    shape, is_stale, error = description.shape, any(part in stale for part in stored), None
    if description.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    note = "its bytes are not those of the manifest" if is_stale else ""
    if not is_stale and "error" in recorded.get(name, {}):
        try:
            error = ErrorStatistics.from_json(recorded[name]["error"])
        except ValueError:
            note = "its errors in the manifest are damaged"
    return TensorReport(
        name,
        description.format.name,
        shape,
        sum(files.stored(part).nbytes for part in stored),
        2 * math.prod(shape),
        True,
        is_stale,
        note,
        error,
    )


def _measured(
    files: Files, source: Files, tensor: TensorReport, description: Description
) -> TensorReport:
    """The report with errors against ``source``, chunk by chunk as they were quantized."""
    name = tensor.name
    original = source.tensors.get(name)
    if original is None or original.shape != tensor.shape:
        raise ValueError(
            f"source: {source.path} has no {show(name)} of shape {list(tensor.shape)}; name the "
            "file that was quantized"
        )
    if TORCH_DTYPES.get(original.dtype) != description.dtype:
        raise ValueError(
            f"source: {show(name)} is {original.dtype} in {source.path}, but "
            f"{str(description.dtype).removeprefix('torch.')} was quantized; name the file that was"
        )
    if not description.by_rows:
        return replace(tensor, error=None, note="not measured: its blocks do not run along rows")
    error = ErrorStatistics()
    for start, shape, q in pieces(name, description, files.stored, files.elements):
        x = source.elements(name, start, math.prod(shape)).view(shape)
        error.add(x, q)
    return replace(tensor, error=error)
