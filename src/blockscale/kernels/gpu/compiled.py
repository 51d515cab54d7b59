# mypy: ignore-errors
"""Kernels, compiled once in a process and kept on disk for the next one.

An entry of the cache is an object file named after two hashes: of what the kernel depends on
(sources, configuration, version of the DSL) and of its own bytes. A file whose bytes do not give
its name is never loaded. Writers hold a lock, so that of many processes only one compiles, and
rename a finished file into place.

A configuration is any hashable value with a ``repr`` that tells all of it, and ``compile()``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

import platformdirs
from filelock import FileLock

__all__ = ["build", "cache_folder", "load"]

_FUNCTION = "blockscale_kernel"


def cache_folder() -> Path:
    """Where object files are kept; ``BLOCKSCALE_CACHE_DIR`` names another place."""
    named = os.environ.get("BLOCKSCALE_CACHE_DIR")
    return Path(named or platformdirs.user_cache_dir("blockscale")) / "kernels"


@cache
def build(config):
    """Compile a kernel, which takes about a second."""
    return config.compile()


@cache
def load(config):
    """The kernel, from the cache on disk if it is there; else compiled, and put there."""
    folder, key = cache_folder(), _key(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            path = _find(folder, key)
            if path is None:
                path = _save(build(config), folder, key)
    except OSError:  # a place that cannot be written to: this process compiles for itself
        return build(config)
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(path), enable_tvm_ffi=True), _FUNCTION)


@lru_cache
def _sources() -> bytes:
    """All code that a kernel is made of: this folder, and the numbers that formats stand for."""
    here = sorted(Path(__file__).parent.glob("*.py"))
    package = Path(__file__).parents[2]
    others = [package / name for name in ("formats.py", "rounding.py", "kernels/cpu/spec.py")]
    return b"".join(path.read_bytes() for path in [*here, *others])


def _key(config) -> str:
    """Hash of all that a kernel depends on."""
    what = type(config).__name__, config, version("nvidia-cutlass-dsl")
    return hashlib.sha256(_sources() + repr(what).encode()).hexdigest()[:32]


def _find(folder: Path, key: str) -> Path | None:
    """The entry, if its bytes are what its name says; any other is removed."""
    for path in folder.glob(f"{key}-*.o"):
        if path.name == _name(key, path.read_bytes()):
            return path
        path.unlink(missing_ok=True)
    return None


def _save(function, folder: Path, key: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        built = Path(place) / "kernel.o"
        function.export_to_c(str(built), _FUNCTION)
        return built.rename(folder / _name(key, built.read_bytes()))


def _name(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()[:32]}.o"
