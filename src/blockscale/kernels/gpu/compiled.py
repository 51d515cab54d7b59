# mypy: ignore-errors
"""Kernels, compiled once in a process and kept on disk for the next one.

An entry of the cache is an object file named after two hashes: of what the kernel depends on
(sources, configuration, version of the DSL) and of its own bytes. A file whose bytes do not give
its name is never loaded. Writers hold a lock, so that of many processes only one compiles, and
rename a finished file into place.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

import cutlass
import platformdirs
from cutlass import cute
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor
from filelock import FileLock

from ...formats import get_format
from .config import Config
from .kernel import NUMERIC, Quantizer

__all__ = ["build", "cache_folder", "load"]

_FUNCTION = "quantize"
_SCALES = {1: cutlass.Uint8, 4: cutlass.Float32}
_MATRICES = ("compact", "sm90", "packed")  # layouts whose scales are stored with two dimensions


def cache_folder() -> Path:
    """Where object files are kept; ``BLOCKSCALE_CACHE_DIR`` names another place."""
    named = os.environ.get("BLOCKSCALE_CACHE_DIR")
    return Path(named or platformdirs.user_cache_dir("blockscale")) / "kernels"


@cache
def build(config: Config):
    """Compile a kernel, which takes about a second."""
    item, spec = config.dtype.itemsize, config.spec
    matrix, words = config.layout in _MATRICES, config.layout == "packed"
    scale = cutlass.Int32 if words else _SCALES[4 if spec.scale_nan > 0xFF else 1]
    outputs = []
    for axis in (-1, -2):
        pair = [_tensor(cutlass.Uint8, 2, 16), _tensor(scale, 1 + matrix, 16)]
        outputs += pair if axis in config.axes else [None, None]
    quantizer = Quantizer(config)
    return cute.compile(
        quantizer,
        _tensor(NUMERIC[config.dtype], 2, 16 if config.tma else item, config.tma),
        *outputs,
        _tensor(cutlass.Float32, 1, 4) if quantizer.encoder.has_table else None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {config.arch}",
    )


def _tensor(dtype, rank: int, align: int, spaced: bool = False):
    """A tensor of any shape, ``align`` bytes aligned; ``spaced``: each of its rows is, too."""
    sizes = tuple(cute.sym_int32() for _ in range(rank))
    apart = cute.sym_int64(divisibility=align * 8 // dtype.width if spaced else 1)
    return make_fake_tensor(dtype, sizes, (apart, 1)[2 - rank :], assumed_align=align)


@cache
def load(config: Config):
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
    return getattr(load_module(str(path), enable_tvm_ffi=True), _FUNCTION)


@lru_cache
def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


def _key(config: Config) -> str:
    """Hash of all that a kernel depends on."""
    what = config, config.spec, get_format(config.format), version("nvidia-cutlass-dsl")
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
