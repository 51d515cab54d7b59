"""Reading a safetensors file piece by piece."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from ..memory import memory_of
from .header import MAX_HEADER, TORCH_DTYPES, Header, Stored, parse, show

__all__ = ["PIECE", "Reader"]

PIECE = 1 << 22  # bytes that are hashed or copied at a time


class Reader:
    """An open safetensors file whose header has been checked.

    Bytes are read with ``pread`` into buffers of our own. A memory map would be as fast, but a file
    that is cut short while it is mapped kills the process (SIGBUS); here it is an OSError.

    Args:
        path: of the file.
        argument: name of the caller's argument, for messages.

    Raises FileNotFoundError, IsADirectoryError or ValueError, with argument and remedy.
    """

    def __init__(self, path: str | os.PathLike[str], argument: str = "path") -> None:
        self.path, self._argument = Path(path), argument
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{argument}: {self.path} does not exist; name a .safetensors file, or a model's "
                "folder"
            ) from None
        except OSError as error:
            raise type(error)(f"{argument}: {self.path}: {error.strerror}") from None
        try:
            self.stat = os.fstat(self._fd)
            self.header = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def _read_header(self) -> Header:
        if stat.S_ISDIR(self.stat.st_mode):
            raise IsADirectoryError(
                f"{self._argument}: {self.path} is a directory; name a .safetensors file in it (a "
                "sharded checkpoint is converted file by file)"
            )
        if not stat.S_ISREG(self.stat.st_mode):
            raise ValueError(f"{self._argument}: {self.path} is not a regular file; copy it to one")
        size = self.stat.st_size
        try:
            if size < 10:
                raise ValueError(f"it has {size} bytes, a header alone takes 10")
            length = int.from_bytes(self._pread(0, 8), "little")
            if length > MAX_HEADER:
                raise ValueError(f"its header would have {length} bytes, more than {MAX_HEADER}")
            if 8 + length > size:
                raise ValueError(f"truncated: {size} bytes, its header alone takes {8 + length}")
            return parse(bytes(self._pread(8, length)), size - 8 - length)
        except ValueError as error:
            if self.path.name.endswith(".index.json"):
                raise ValueError(
                    f"{self._argument}: {self.path} is the index of a checkpoint, which says what "
                    "is in which of its files; pass each of these by itself: "
                    f"{self.path.parent}/*.safetensors"
                ) from None
            raise ValueError(
                f"{self._argument}: {self.path} is not a whole safetensors file: {error}; fetch or "
                "save it again"
            ) from None

    def _pread(self, offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        self._fill(memoryview(buffer), offset)
        return buffer

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not got:
                raise OSError(
                    f"{self._argument}: {self.path} became shorter while it was read; start again "
                    "when nothing writes to it"
                )
            done += got

    def bytes(self, tensor: Stored, start: int, count: int) -> bytearray:
        """``count`` bytes of a tensor from its byte ``start`` on."""
        return self._pread(_place(tensor, start, count), count)

    def elements(self, name: str, start: int, count: int, memory: Tensor | None = None) -> Tensor:
        """``count`` elements from element ``start`` on, in one dimension; in ``memory``, bytes that
        are as many or more, or in memory of their own."""
        tensor = self.header.tensors[name]
        dtype = TORCH_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ValueError(
                f"{self._argument}: torch has no dtype for {tensor.dtype} ({show(name)})"
            )
        nbytes = count * dtype.itemsize
        if memory is None:  # not frombuffer: whose storage cannot be resized
            memory = torch.empty(nbytes, dtype=torch.uint8)
        out = memory[:nbytes].view(dtype)
        at = _place(tensor, start * dtype.itemsize, out.nbytes)
        self._fill(memory_of(out, np.uint8, out.nbytes).data, at)
        return out

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        stored = self.header.tensors[name]
        return self.elements(name, 0, stored.numel).view(stored.shape)

    def checksum(self, name: str, seen: Callable[[int], None] = lambda count: None) -> str:
        """XXH3 (128 bits) of a tensor's bytes; ``seen`` hears of each piece's length."""
        tensor = self.header.tensors[name]
        return self._checksum(tensor.offset, tensor.nbytes, seen)

    def header_checksum(self) -> str:
        """The same of everything before the data."""
        return self._checksum(0, self.header.data_start, lambda count: None)

    def _checksum(self, offset: int, count: int, seen: Callable[[int], None]) -> str:
        digest = xxh3_128()
        for start in range(0, count, PIECE):
            piece = self._pread(offset + start, min(PIECE, count - start))
            digest.update(piece)
            seen(len(piece))
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """OSError if somebody wrote to the file since it was opened."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.stat.st_size, self.stat.st_mtime_ns):
            raise OSError(
                f"{self._argument}: {self.path} changed while it was read; start again when "
                "nothing writes to it"
            )


def _place(tensor: Stored, start: int, count: int) -> int:
    """Offset in the file of ``count`` bytes of a tensor from its byte ``start`` on."""
    if start + count > tensor.nbytes:
        raise ValueError(f"bytes {start} to {start + count} of a tensor that has {tensor.nbytes}")
    return tensor.offset + start
