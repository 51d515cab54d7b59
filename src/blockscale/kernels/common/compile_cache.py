"""Kernels, compiled once in a process and kept on disk for the next one.

An entry of the cache is a shared library named after two hashes: of what the kernel depends on
(sources, configuration, version of the DSL) and of its own bytes. A file whose bytes do not give
its name is never loaded. Writers hold a lock, so that of many processes only one compiles, and
rename a finished file into place. Loading a library needs no CuTe DSL, whose import takes seconds.
Where there is no linker, an entry is an object file, which needs it.

A configuration is any hashable value with a ``repr`` that tells all of it, whose type ``builders``
knows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from .builders import build_kernel, made_of

__all__ = ["build", "cache_folder", "is_cached", "last_built", "load"]

Kernel = Callable[..., Any]

_FUNCTION = "blockscale_kernel"

_built: list[Kernel] = []


def cache_folder() -> Path:
    """Where object files are kept; ``BLOCKSCALE_CACHE_DIR`` names another place."""
    named = os.environ.get("BLOCKSCALE_CACHE_DIR")
    return Path(named or platformdirs.user_cache_dir("blockscale")) / "kernels"


@cache
def build(config: Any) -> Kernel:
    """Compile a kernel, which takes about a second."""
    kernel: Kernel = build_kernel(config)
    _built.append(kernel)
    return kernel


def last_built() -> Any:
    """What the DSL made of the kernel that this process compiled last; None if it did not."""
    return _built[-1] if _built else None


@cache
def load(config: Any) -> Kernel:
    """The kernel, from the cache on disk if it is there; else compiled, and put there."""
    folder, key = cache_folder(), _key(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            path = _find(folder, key)
            kernel = None if path is None else _open(path)
            return kernel or _open(_save(build(config), folder, key)) or build(config)
    except OSError:  # a place that cannot be written to: this process compiles for itself
        return build(config)


def is_cached(config: Any) -> bool:
    """Whether :func:`load` finds the kernel on disk."""
    return _find(cache_folder(), _key(config)) is not None


@lru_cache
def _sources(module: str) -> bytes:
    """Code that a kernel may be made of: the folder of a module, this one, and the numbers that
    formats stand for."""
    here, package = Path(__file__).parent, Path(__file__).parents[2]
    folders = {Path(str(import_module(module).__file__)).parent, here}
    paths = [path for folder in sorted(folders) for path in sorted(folder.glob("*.py"))]
    paths += [package / name for name in ("error_sums.py", "formats.py", "rounding.py")]
    return b"".join(path.read_bytes() for path in paths)


def _key(config: Any) -> str:
    """Hash of all that a kernel depends on."""
    what = type(config).__name__, config, version("nvidia-cutlass-dsl")
    sources = b"".join(_sources(module) for module in made_of(type(config)))
    return hashlib.sha256(sources + repr(what).encode()).hexdigest()[:32]


def _find(folder: Path, key: str) -> Path | None:
    """The entry, if its bytes are what its name says; any other is removed."""
    for path in folder.glob(f"{key}-*"):
        if path.name == _name(key, path):
            return path
        path.unlink(missing_ok=True)
    return None


def _open(path: Path) -> Kernel | None:
    """The kernel in a file; None, and no file, if what it was linked with has gone."""
    if path.suffix == ".o":
        runtime = import_module("cutlass.cute.runtime")
        kernel: Kernel = getattr(runtime.load_module(str(path), enable_tvm_ffi=True), _FUNCTION)
        return kernel
    try:
        kernel = import_module("tvm_ffi").load_module(str(path)).get_function(_FUNCTION)
    except (OSError, RuntimeError):
        path.unlink(missing_ok=True)
        return None
    return kernel


def _save(kernel: Any, folder: Path, key: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        built = Path(place) / "kernel.o"
        kernel.export_to_c(str(built), _FUNCTION)
        built = _link(built)
        return built.rename(folder / _name(key, built))


def _link(built: Path) -> Path:
    """An object file as a shared library that finds what it needs; itself without a linker."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    needed = import_module("cutlass.runtime").find_runtime_libraries(enable_tvm_ffi=True)
    library = built.with_suffix(".so")
    if compiler is None:
        return built
    paths = [option for path in needed for option in (path, f"-Wl,-rpath,{Path(path).parent}")]
    command = [compiler, "-shared", "-o", str(library), str(built), *paths]
    done = subprocess.run(command, capture_output=True, check=False)
    return library if done.returncode == 0 else built


def _name(key: str, path: Path) -> str:
    return f"{key}-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}{path.suffix}"
