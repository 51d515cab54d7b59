"""When the names that need torch come into the package: with the first of them, or with torch.

``import blockscale`` imports no torch, so that processes without it can use the rest. But torch
asks for nothing of ours by a name of the package: ``torch.load``, ``torch.export.load`` and
``torch.ops.blockscale`` take what is registered with torch. So there is one rule: where torch and
blockscale are both imported, ``torch_side`` is too, whichever came first (sorted imports have
blockscale before torch).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["defer", "find"]

_PACKAGE = __name__.rpartition(".")[0]

#: Exported packages; all other exported names are no modules.
_PACKAGES = ("checkpoint", "debug", "distributed", "nn")

#: Modules of ours that are half run: torch's side could not import their names.
_HALF_WAY: set[str] = set()


def defer() -> None:
    """Let torch's side come later; at once where torch is imported already."""
    sys.modules[_PACKAGE].__class__ = _Package
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _come_with_torch()


def find(name: str) -> Any:
    """What the package exports as ``name`` and does not have yet; ImportError without torch."""
    try:
        if name in _PACKAGES:
            return import_module(f".{name}", _PACKAGE)
        _bring()
        return vars(sys.modules[_PACKAGE])[name]
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{_PACKAGE}.{name} needs PyTorch, and there is none here: pip install torch",
            name="torch",
        ) from error


def _bring() -> None:
    """Import torch's side; from then on nothing is looked for."""
    side = import_module(".torch_side", _PACKAGE)
    vars(sys.modules[_PACKAGE]).update({name: getattr(side, name) for name in side.__all__})
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


def _come_with_torch() -> None:
    if sys.modules.get("torch") is not None and not _HALF_WAY:
        _bring()


class _Package(ModuleType):
    """The package, in which no submodule takes the place of an exported name.

    The import system binds a submodule in its package after it was imported, and some have the name
    of what is in them: ``blockscale.gemm`` would be a module or a function by the order of imports.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES or name not in self.__all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


class _Finder(MetaPathFinder):
    """Finds torch and our modules as those behind it do, and looks on when they are run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" and not fullname.startswith(f"{_PACKAGE}."):
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs a module by its own loader, which it has from then on. Torch's side comes when torch has
    been run, or the last of our modules that wanted it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        if name != "torch":
            _HALF_WAY.add(name)
        try:
            self.loader.exec_module(module)
        finally:
            _HALF_WAY.discard(name)
        _come_with_torch()


_FINDER = _Finder()
