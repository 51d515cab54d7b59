"""The cache of compiled quantizers on disk, and the choice of a kernel. No GPU is needed."""

import dataclasses
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from blockscale.dtypes import from_torch
from blockscale.kernels.common import compile_cache
from blockscale.kernels.quantizers.config import Config, Request, choose_config


def config(shape: tuple[int, int] = (256, 256), **kwargs) -> Config:
    stride, dtype = kwargs.pop("stride", shape[1]), kwargs.pop("dtype", torch.bfloat16)
    axes = kwargs.setdefault("axes", (-1,))
    kwargs["layouts"] = (kwargs.pop("layout", "compact"),) * len(axes)
    sources = [(kwargs.pop("address", 0), stride * dtype.itemsize)]
    return choose_config(shape, sources, from_torch(dtype), Request("mxfp8", **kwargs))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKSCALE_CACHE_DIR", str(tmp_path))
    # what is compiled outside the emulator keeps no PTX for the tests that come after these
    monkeypatch.setattr(compile_cache, "build", cache(compile_cache.build.__wrapped__))
    compile_cache.load.cache_clear()
    yield tmp_path / "kernels"
    compile_cache.load.cache_clear()


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


def test_second_process_does_not_compile(folder, monkeypatch):
    compile_cache.load(config())
    (entry,) = entries(folder)
    compile_cache.load.cache_clear()  # as another process
    monkeypatch.setattr(compile_cache, "build", lambda config: pytest.fail("compiled again"))
    assert callable(compile_cache.load(config()))
    assert entries(folder) == [entry]


def test_corrupt_entry_is_rebuilt(folder):
    compile_cache.load(config())
    (entry,) = entries(folder)
    content = entry.read_bytes()
    for broken in (b"", content[:1000], bytes([content[0] ^ 1]) + content[1:]):
        entry.unlink()  # another file: this process has the old one mapped
        entry.write_bytes(broken)
        compile_cache.load.cache_clear()
        assert callable(compile_cache.load(config()))
        (rebuilt,) = entries(folder)
        assert compile_cache._name(rebuilt.name.split("-")[0], rebuilt) == rebuilt.name


def test_loading_needs_no_cute_dsl(folder):
    """Its import takes seconds; a second process has the kernel in a fraction of one."""
    compile_cache.load(config())
    (entry,) = entries(folder)
    assert entry.suffix == ".so"
    code = (
        "import sys, torch, pathlib; from blockscale.kernels.common import compile_cache as cache;"
        f"assert cache._open(pathlib.Path({str(entry)!r})); assert 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_linker(folder, monkeypatch):
    monkeypatch.setattr(compile_cache.shutil, "which", lambda name: None)
    compile_cache.load(config())
    (entry,) = entries(folder)
    assert entry.suffix == ".o"
    compile_cache.load.cache_clear()
    assert callable(compile_cache.load(config()))


def test_entry_whose_libraries_have_gone_is_rebuilt(folder):
    compile_cache.load(config())
    (entry,) = entries(folder)
    broken = folder / "broken.so"  # a library in name alone
    broken.write_bytes(b"no library")
    broken.rename(folder / compile_cache._name(entry.name.split("-")[0], broken))
    entry.unlink()
    compile_cache.load.cache_clear()
    assert callable(compile_cache.load(config()))
    assert entries(folder) == [entry]


def test_unwritable_folder(folder, monkeypatch):
    folder.parent.joinpath("kernels").write_text("a file where the folder should be")
    assert callable(compile_cache.load(config()))


def test_key_depends_on_configuration_source_and_version(monkeypatch):
    base = compile_cache._key(config())
    assert base == compile_cache._key(config())
    keys = {base}
    for field, value in (
        ("arch", "sm_100a"),
        ("warps", 2),
        ("nonfinite", "te"),
        ("aligned", False),
    ):
        keys.add(compile_cache._key(dataclasses.replace(config(), **{field: value})))
    monkeypatch.setattr(compile_cache, "version", lambda package: "0")
    keys.add(compile_cache._key(config()))
    monkeypatch.setattr(compile_cache, "_sources", lambda module: b"other")
    keys.add(compile_cache._key(config()))
    assert len(keys) == 7


def test_choice_depends_on_no_number_of_rows():
    """Batches of every size share a kernel, but for those that do not fill a GPU."""
    for few in ((1, 2, 15, 16), (17, 127, 128, 256), (300, 4096, 1 << 30)):
        assert len({config((m, 7168), layout="tcgen05") for m in few}) == 1


@pytest.mark.parametrize("layout", ["compact", "tcgen05", "packed"])
@pytest.mark.parametrize("axes", [(-1,), (-2,), (-1, -2)])
@pytest.mark.parametrize("columns", [16, 32, 96, 160, 1000, 2880, 7168])
def test_tiles_fit(columns, axes, layout):
    for dtype in (torch.bfloat16, torch.float32):
        c = config((999, columns), axes=axes, layout=layout, dtype=dtype)
        shared = c.tile_rows * c.tile_columns * dtype.itemsize
        assert shared <= 128 << 10  # of the 227 KiB of a Hopper or Blackwell SM
        assert c.tile_rows * c.panels % (4 * c.warps) == 0
        assert c.tile_columns % 128 == 0
        for axis, store in zip(axes, c.scale_stores, strict=True):
            line = -(-columns // 32) if axis == -1 else columns
            assert layout != "compact" or line % store == 0
        if -2 in axes:
            assert c.tile_rows % 32 == 0
            assert (2 * c.tile_rows // 32 * c.panels) % c.warps == 0  # halves of bands
        assert c.warps * 32 <= 1024


def test_tma_wants_sixteen_bytes():
    assert config((8, 64)).aligned
    assert not config((8, 64), address=2).aligned
    assert not config((8, 64), stride=65).aligned
    assert config((8, 64), stride=72).aligned
    assert config((8, 64), stride=68, dtype=torch.float32).aligned
