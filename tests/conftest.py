"""Shared by all tests: both CPU backends, and hypothesis without a clock."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import mmap
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from blockscale.ops import backends

settings.register_profile("blockscale", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("blockscale")
torch.set_num_threads(1)  # the suite runs a worker on each core


#: Of files, by how their paths begin: what all of their tests are.
_MARKS = {
    "kernels": (
        *("kernels/test_gpu_", "kernels/test_sm", "kernels/test_gemm_"),
        "kernels/test_quantizer_code",
        *("cli/test_emulate_", "emulator/test_mutation", "emulator/test_pipelines", "test_warm"),
        "examples/",
    ),
    "slow": (
        *("kernels/test_cpu", "test_ops", "test_fused", "test_properties", "training/"),
        "jax/test_cpu_ffi",
        *("nn/test_nn_ranks", "nn/test_nn_quantized_ranks", "nn/test_nn_compile"),
        *("nn/test_nn_layer_plan", "checkpoint/test_checkpoint_kill"),
    ),
}


#: Of the cases of a test that runs kernels in the emulator, one of so many is a part of every run,
#: and two at least, one of long ones; the others are run with --exhaustive.
_ONE_OF = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run every case of every kernel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    of_tests: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_tests[item.path, item.nodeid.partition("[")[0]].append(item)
        path = item.path.relative_to(root).as_posix()
        for mark, beginnings in _MARKS.items():
            if path.startswith(beginnings):
                item.add_marker(mark)
    for cases in of_tests.values():
        if marker := cases[0].get_closest_marker("sampled"):
            for case in in_no_order(cases)[marker.args[0] :]:
                case.add_marker("slow")
        if cases[0].get_closest_marker("kernels") and not config.option.exhaustive:
            others = pytest.mark.skip(reason="one of the cases that --exhaustive runs")
            least = 1 if cases[0].get_closest_marker("long") else 2
            for case in in_no_order(cases)[max(least, -(-len(cases) // _ONE_OF)) :]:
                case.add_marker(others)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector need not walk over them again and again, nor
    so often over what compiled kernels keep."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


_MUCH = 1 << 30  # bytes
_kept = [0]  # bytes that were still held when memory was given back last


def pytest_runtest_logfinish() -> None:
    """Memory goes back to the system: an emulated launch that took a lot leaves cycles, which the
    collector seldom looks for, and glibc keeps what is free in pieces. Workers held 15 GB each."""
    if _held() > _kept[0] + _MUCH:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _kept[0] = _held()


def _held() -> int:
    """Bytes of this process in memory; 0 where Linux does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def in_no_order(cases: list[pytest.Item]) -> list[pytest.Item]:
    """By a hash of names: a stride would meet one value of a parameter only."""
    return sorted(cases, key=lambda case: zlib.crc32(case.name.encode()))


@pytest.fixture(scope="module", params=["reference", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the plain-torch reference and with the compiled CPU kernels."""
    if request.param == "numba" and not importlib.util.find_spec("numba"):
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "cpu_backend", lambda: request.param)
        yield request.param


@pytest.fixture(scope="module")
def transformers_restored() -> Iterator[None]:
    """What ``import blockscale.hf`` registers is gone when the tests of a file are over."""
    auto = pytest.importorskip("transformers.quantizers.auto")
    names = "AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"
    kept = {name: dict(getattr(auto, name)) for name in names}
    attributes = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    if "blockscale.hf" in sys.modules:  # which registers when it is imported first
        sys.modules["blockscale.hf"].register()
    yield
    for name, mapping in kept.items():
        getattr(auto, name).clear()
        getattr(auto, name).update(mapping)
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = attributes
