"""Writing a file so that its name never holds anything but the whole of it, and resuming.

While ``OUT`` is made there are three files beside it::

    OUT.journal   first line: what is made from what; then a line for each finished tensor
    OUT.partial   the file, at its full length from the start, tensors at their final places
    OUT.lock      held while somebody writes

A journal line is appended after the bytes it speaks of, with a checksum of its own, and on resuming
the bytes of each line are checked against its checksums. A line that is damaged counts as not
written. So it does not matter where a process was killed, or which of its writes a machine that
lost power had kept. ``OUT.partial`` is never there without its journal.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from torch import Tensor
from xxhash import xxh3_128

from ..checks import check_target
from ..memory import memory_of
from .header import Header, Stored
from .manifest import write_manifest
from .reader import Reader

__all__ = [
    "Output",
    "check_space",
    "format_bytes",
    "locked",
    "replacing",
    "tensor_bytes",
]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def beside(target: Path, suffix: str) -> Path:
    """``OUT`` -> ``OUT.journal`` and so on."""
    return target.with_name(target.name + suffix)


def format_bytes(count: float) -> str:
    """1234567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memory_of(tensor.detach(), np.uint8, tensor.nbytes).data


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold ``OUT.lock``. ValueError at once if another process (or thread) holds it."""
    lock = FileLock(beside(target, ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"target: {target} is being written by another process; wait for it to end"
        ) from None
    except OSError as error:
        raise type(error)(
            f"target: cannot write in {target.parent} ({error.strerror}); choose another place"
        ) from None
    try:
        yield
    finally:
        beside(target, ".lock").unlink(missing_ok=True)  # while it is held, so nobody else's goes
        lock.release()


@contextmanager
def replacing(path: Path, argument: str) -> Iterator[BinaryIO]:
    """A file to write; it gets its name, and replaces what had it, when all is on disk."""
    check_target(argument, path)
    temporary = beside(path, f".{secrets.token_hex(4)}.tmp")
    try:
        with _explained(path, argument):
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def _explained(path: Path, argument: str, hint: str = "") -> Iterator[None]:
    """Turns an error of the system into a sentence with argument and remedy."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # has its sentence already
            raise
        remedy = "free some space" if error.errno in _FULL else "check the place, or choose another"
        raise OSError(
            f"{argument}: writing {path} failed ({error.strerror}), it is as it was before; "
            f"{remedy}{hint}"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make renames in it last."""
    with suppress(OSError):  # some file systems cannot
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Part:
    """One stored tensor of an :class:`Output`, written from its first byte to its last."""

    def __init__(self, output: Output, tensor: Stored) -> None:
        self._output, self._offset, self._left = output, tensor.offset, tensor.nbytes
        self._digest = xxh3_128()

    def write(self, piece: memoryview | bytearray | bytes) -> None:
        """Append; the caller brings exactly as many bytes as the header promised."""
        if len(piece) > self._left:
            raise AssertionError(f"{len(piece) - self._left} bytes more than planned")
        self._output.write(piece, self._offset)
        self._digest.update(piece)
        self._offset += len(piece)
        self._left -= len(piece)

    def checksum(self) -> str:
        """The checksum of the whole tensor. AssertionError where bytes are missing."""
        if self._left:
            raise AssertionError(f"{self._left} bytes fewer than planned")
        return self._digest.hexdigest()


class Output:
    """``OUT`` in the making, with the lock held; :meth:`commit` or :meth:`close` ends it.

    Args:
        target: the final name.
        head: length and JSON, as :func:`header.build` makes them.
        header: where the tensors lie.
        identity: all that decides about the bytes, but for those of the source. A journal with
            another identity is not resumed.
        is_current: whether a record is of what would be made now; one that is not counts as not
            written.

    Attributes:
        records: tensors that are finished, and the record given to :meth:`finish`.
        note: what became of an earlier attempt; empty where there was none.

    Raises OSError where there is no room for the file.
    """

    def __init__(
        self,
        target: Path,
        head: bytes,
        header: Header,
        identity: Mapping[str, Any],
        is_current: Callable[[str, Mapping[str, Any]], bool],
    ) -> None:
        self._target, self._header, self._is_current = target, header, is_current
        self._partial, self._journal = beside(target, ".partial"), beside(target, ".journal")
        self.header_checksum = xxh3_128(head).hexdigest()
        identity = {**identity, "header": self.header_checksum}
        self._identity = json.loads(json.dumps(identity))  # as it will be read back
        self.records, self.note = self._find_earlier()
        check_space(target, {target: header.file_size})
        self._log, self._file, self._lock = -1, -1, threading.Lock()
        with self._explained():
            self._open(head)

    def _find_earlier(self) -> tuple[dict[str, Any], str]:
        if not self._partial.exists():
            return {}, ""
        if not self._journal.exists():
            raise ValueError(
                f"target: {self._partial} is in the way and has no journal, so it was not made "
                "here; move it away"
            )
        identity, *lines = _lines(self._journal) or [{}]
        if "header" not in identity:  # the first line is not what it was
            return {}, "started anew: the journal of the unfinished file is damaged"
        if identity != self._identity:
            other = [key for key in self._identity if identity.get(key) != self._identity[key]]
            return {}, f"started anew: the unfinished file was made with another {', '.join(other)}"
        records = {line["name"]: line["record"] for line in lines}
        try:
            with Reader(self._partial) as file:
                if file.header_checksum() != self.header_checksum:
                    raise ValueError("header")
                whole = {name: record for name, record in records.items() if _intact(record, file)}
        except (OSError, ValueError):
            return {}, "started anew: the unfinished file is damaged"
        whole = {name: r for name, r in whole.items() if self._is_current(name, r)}
        return whole, f"resumed: {len(whole)} tensors are finished" if whole else ""

    def _open(self, head: bytes) -> None:
        flags, fresh = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), not self.records
        try:
            if fresh:
                self._partial.unlink(missing_ok=True)
                self._journal.unlink(missing_ok=True)
            self._log = os.open(self._journal, flags | os.O_APPEND, 0o666)
            if fresh:
                self._append(self._identity)
                os.fsync(self._log)
            self._file = os.open(self._partial, flags, 0o666)
            if fresh:
                _reserve(self._file, self._header.file_size)
                self.write(head, 0)
        except BaseException:
            self._close(discard=fresh)
            raise

    def close(self) -> None:
        """Leave what is finished for another attempt; nothing where nothing is."""
        self._close(discard=not self.records)

    def _close(self, discard: bool) -> None:
        descriptors, self._file, self._log = (self._file, self._log), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        if discard:
            self._partial.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        hint = " and run it again: what is finished will not be redone" if self.records else ""
        with _explained(self._target, "target", hint):
            yield

    def write(self, piece: memoryview | bytearray | bytes, offset: int) -> None:
        """Put bytes at an offset of the file."""
        view = memoryview(piece)
        with self._explained():
            while view:
                done = os.pwrite(self._file, view, offset)
                view, offset = view[done:], offset + done

    def parts(self, names: Iterable[str]) -> dict[str, Part]:
        """Writers of these stored tensors."""
        return {name: Part(self, self._header.tensors[name]) for name in names}

    def finish(self, name: str, record: Mapping[str, Any]) -> None:
        """Note that a tensor is done. ``record["checksums"]`` are those of its stored tensors."""
        with self._lock:
            with self._explained():
                self._append({"name": name, "record": record})
            self.records[name] = record

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line).encode()
        # a newline in front too: it closes a line that was cut
        view = memoryview(b"\n" + _checksum(text) + b" " + text + b"\n")
        while view:
            view = view[os.write(self._log, view) :]

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Give the file its name, the manifest before it: where ``OUT`` is, all is done."""
        with self._explained():
            os.fsync(self._file)
            write_manifest(self._target, manifest)
            os.replace(self._partial, self._target)
            sync_directory(self._target.parent)
            self._journal.unlink()
        self._close(discard=False)


def check_space(target: Path, sizes: Mapping[Path, int]) -> None:
    """OSError unless all files of ``target`` will have room; what is there of them counts."""
    need = sum(max(size - _held(path), 0) for path, size in sizes.items())
    free = shutil.disk_usage(target.parent).free
    if need > free:
        raise OSError(
            f"target: {target} needs {format_bytes(need)}, but only {format_bytes(free)} are free "
            "there; free some space, or choose another place"
        )


def _held(path: Path) -> int:
    """Bytes of the disk that a file has, finished or not."""
    partial = beside(path, ".partial")
    if path.exists():
        return path.stat().st_size
    return partial.stat().st_blocks * 512 if partial.exists() else 0


def _intact(record: Mapping[str, Any], file: Reader) -> bool:
    return all(file.checksum(name) == digest for name, digest in record["checksums"].items())


def _reserve(descriptor: int, size: int) -> None:
    """Full length, with its blocks where the file system can, so that a full disk shows at once."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in _FULL:
            raise
        os.ftruncate(descriptor, size)


def _checksum(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode()


def _lines(path: Path) -> list[Any]:
    """The lines of a journal that are as they were written."""
    split = (line.partition(b" ") for line in path.read_bytes().splitlines())
    return [json.loads(text) for digest, _, text in split if digest == _checksum(text)]
