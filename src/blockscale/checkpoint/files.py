"""The files of a checkpoint: one, or a folder with several and an index that says what is where."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from torch import Tensor

from .header import Stored, show
from .index import INDEX, find_index, read_index
from .reader import Reader

__all__ = ["Files"]

#: Endings of files with weights. Those that the index does not name are other copies of the model.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"),
    ".index.json",
)


class Files:
    """Safetensors files that are read together. Use it as a context manager.

    A tensor's parts, and the weights that servers fuse, may lie in several files: they are found by
    the index, beside a single file, too.

    Args:
        path: of a file, or of a folder with an index or with one file.
        argument: name of the caller's argument, for messages.
        names: of the files of a folder that are read, where it has several checkpoints.

    Attributes:
        path: as it was given.
        folder: in which they lie.
        is_folder: whether all files of a folder were asked for.
        names: of the files that were asked for.
        tensors: of these files, in the order of their bytes.
        places: tensor -> file as the index says; None without an index.
        index: name of the index of a folder, if it has one.

    Raises FileNotFoundError, IsADirectoryError or ValueError, with argument and remedy.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        argument: str = "path",
        names: Collection[str] | None = None,
    ) -> None:
        self.path, self._argument = Path(path), argument
        self._open: dict[str, Reader] = {}
        self._lock = threading.Lock()
        self.is_folder = self.path.is_dir()
        self.index: str | None = None
        try:
            if self.is_folder:
                self.folder = self.path
                self.places, self.names = self._of_folder(names)
            else:
                self.folder, self.names = self.path.parent, [self.path.name]
                self.file(self.path.name)  # its own errors come first
                self.places = find_index(self.path, argument)
            self.tensors, self._homes = self._contents()
        except BaseException:
            self._close()
            raise

    def _of_folder(self, names: Collection[str] | None) -> tuple[dict[str, str] | None, list[str]]:
        """What the index says, and the files; of a folder without an index its only file."""
        indices = sorted(self.folder.glob(INDEX))
        if names is not None and len(indices) > 1:
            indices = [each for each in indices if self._has_files(each, names)]
        if len(indices) > 1:
            raise ValueError(
                f"{self._argument}: {self.folder} has {len(indices)} indices "
                f"({', '.join(each.name for each in indices[:3])}); leave one"
            )
        if indices:
            places: dict[str, str] = read_index(indices[0], self._argument)["weight_map"]
            self.index = indices[0].name
            return places, sorted(set(places.values()))
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(files) != 1:
            what = "no" if not files else f"{len(files)}"
            raise ValueError(
                f"{self._argument}: {self.folder} has {what} .safetensors files and no index "
                "(*.safetensors.index.json) that says which tensor is where; fetch it again"
            )
        return None, files

    def _has_files(self, index: Path, names: Collection[str]) -> bool:
        found = set(read_index(index, self._argument)["weight_map"].values())
        return found == set(names)

    def _contents(self) -> tuple[dict[str, Stored], dict[str, str]]:
        """The tensors of the files that were asked for, and the file that each is in."""
        tensors: dict[str, Stored] = {}
        homes: dict[str, str] = {}
        for file in self.names:
            header = self.file(file).header
            for name in header.tensors.keys() & tensors.keys():
                raise ValueError(
                    f"{self._argument}: {show(name)} is in {homes[name]} and in {file} of "
                    f"{self.folder}; fetch it again"
                )
            tensors |= header.tensors
            homes |= dict.fromkeys(header.tensors, file)
        if self.is_folder and self.places is not None:
            for name, file in self.places.items():
                if homes.get(name) != file:
                    raise self._missing(name, file)
        return tensors, homes

    def _missing(self, name: str, file: str) -> ValueError:
        return ValueError(
            f"{self._argument}: the index of {self.folder} says that {show(name)} is in {file}, "
            "but it is not; fetch the checkpoint again"
        )

    def file(self, name: str) -> Reader:
        """One of the files, opened."""
        with self._lock:
            if name not in self._open:
                path = self.folder / name
                if path != self.path and not path.exists():
                    raise FileNotFoundError(
                        f"{self._argument}: the index of {self.folder} names {name}, which is not "
                        "there; fetch the checkpoint again"
                    )
                self._open[name] = Reader(path, self._argument)
            return self._open[name]

    def find(self, name: str) -> Reader | None:
        """The file with a tensor, one that was not asked for, too; None where there is none.

        Raises ValueError where the index names a file that does not have it.
        """
        if name in self._homes:
            return self.file(self._homes[name])
        place = (self.places or {}).get(name)
        if place is None:
            return None
        if name not in self.file(place).header.tensors:
            raise self._missing(name, place)
        return self.file(place)

    def holder(self, name: str) -> Reader:
        """The file with a tensor that is in one."""
        file = self.find(name)
        assert file is not None
        return file

    def stored(self, name: str) -> Stored:
        """A stored tensor of one of the files."""
        return self.holder(name).header.tensors[name]

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a stored tensor; None where no tensor has this name."""
        file = self.find(name)
        return None if file is None else file.header.tensors[name].shape

    def elements(self, name: str, start: int, count: int, memory: Tensor | None = None) -> Tensor:
        """Read elements of a tensor in one of the files, as :meth:`Reader.elements` does."""
        return self.holder(name).elements(name, start, count, memory)

    @property
    def knows_all(self) -> bool:
        """Whether every tensor of the checkpoint can be found."""
        return self.is_folder or self.places is not None

    def beside(self) -> tuple[dict[str, Path], list[str]]:
        """What a folder has beside these weights: name -> path, and names of other weights."""
        found: dict[str, Path] = {}
        weights: list[str] = []
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or any(part.startswith(".") for part in Path(name).parts):
                continue
            if not name.endswith(_WEIGHTS):
                found[name] = path
            elif name not in self.names and not name.endswith(".index.json"):
                weights.append(name)
        return found, weights

    def check_unchanged(self) -> None:
        """OSError if somebody wrote to one of the files since it was opened."""
        for file in self._open.values():
            file.check_unchanged()

    def _close(self) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
