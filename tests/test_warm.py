"""Kernels that are compiled ahead. The GPU is one that is not there, its kernels are stubs."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import blockscale as bs
from blockscale.cli import app
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.quantizers.config import Request, choose_config
from stand_in import gpu, matrix


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled."""
    found = []
    module = import_module("blockscale.kernels.common.compile_all")
    monkeypatch.setattr(module, "compile_all", lambda configs, _: found.extend(configs))
    return found


@pytest.fixture
def ran():
    """Kernels that ran, on a GPU whose tensors are a CPU's."""
    found = []
    with gpu("sm_90a", lambda config: lambda *args: found.append(config), quantizes=True):
        yield found


def step(x, weight):
    return bs.gemm(bs.quantize(x), bs.quantize(weight).mT)


def test_kernels_are_noted_and_do_not_run(compiled, ran):
    x, w = matrix(64, 256), matrix(128, 256, seed=1)
    with bs.warm() as found:
        assert step(x, w).shape == (64, 128)
        assert len(found) == 4  # two quantizers, what puts A in order, the product
    assert compiled == found
    assert ran == []
    step(x, w)
    assert set(ran) == set(compiled)


def test_what_was_noted_is_launched_afterwards(compiled, ran):
    """Operands that were seen inside, whose products were looked up there."""
    a, b = bs.quantize(matrix(64, 256)), bs.quantize(matrix(128, 256, seed=1)).mT
    for _ in range(2):
        bs.gemm(a, b)
    ran.clear()
    for _ in range(2):
        with bs.warm():
            for _ in range(3):
                bs.gemm(a, b)
        assert ran == []
    for n in (1, 2, 3):
        bs.gemm(a, b)
        assert len(ran) == 2 * n


def test_layers(compiled, ran):
    layer = bs.nn.Linear(256, 128, recipe=bs.Recipe("fp8_block"), dtype=torch.bfloat16)
    x = matrix(64, 256).requires_grad_()
    with bs.warm() as found:
        layer(x).backward(matrix(64, 128, seed=1))
    assert ran == []
    layer(x).backward(matrix(64, 128, seed=1))
    assert set(ran) == set(found) == set(compiled)


def test_compiled_layers(compiled, ran):
    """Whose plans are looked up, too."""
    torch.compiler.reset()
    layer = bs.nn.Linear(256, 128, recipe=bs.Recipe("fp8_block"), dtype=torch.bfloat16)
    run = torch.compile(layer, backend="aot_eager")
    x = matrix(64, 256).requires_grad_()
    with bs.warm() as found:
        run(x).backward(matrix(64, 128, seed=1))
    assert ran == []
    run(x).backward(matrix(64, 128, seed=1))
    assert set(ran) == set(found) == set(compiled)


def test_errors_leave_all_as_it_was(compiled, ran):
    x, w = matrix(64, 256), matrix(128, 256, seed=1)
    with pytest.raises(TypeError, match="ScaledTensor"), bs.warm():
        bs.gemm(bs.quantize(x), step(x, w))
    assert compiled == []
    step(x, w)
    assert len(ran) == 4


def test_without_a_gpu_nothing_changes(compiled):
    x, w = matrix(64, 256), matrix(128, 256, seed=1)
    with bs.warm() as found:
        y = step(x, w)
    assert found == compiled == []
    assert torch.equal(y, step(x, w))


def test_processes_fill_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_CACHE_DIR", str(tmp_path))
    asked = [Request("mxfp8", nonfinite=each) for each in ("propagate", "te")]
    configs = [choose_config((256, 256), [(0, 512)], BFLOAT16, each) for each in asked]
    assert compile_all([*configs, configs[0]]) == 2
    assert all(map(compile_cache.is_cached, configs))
    assert compile_all(configs) == 0


def test_the_command(compiled):
    given = ["warm", "256x512,512x256", "--tokens", "1,64", "--arch", "sm_90a"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    assert f"{len(set(compiled))} kernels for sm_90a are in the cache" in found.output
    assert {config.arch for config in compiled if hasattr(config, "arch")} == {"sm_90a"}
    fewer = CliRunner().invoke(app, [*given, "--no-train"])
    assert fewer.exit_code == 0, fewer.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["256"], "layers: got '256'; expected N and K like 4096x4096"),
        (["256x256", "--tokens", "0"], "tokens: got '0'; expected a number"),
        (["256x256", "--dtype", "int8"], "dtype: got 'int8'; choose one of 'float32'"),
        (["256x256", "--arch", "sm_80"], "arch: got 'sm_80'"),
        (["256x256", "--recipe", "fp5"], "format: got 'fp5'"),
    ],
)
def test_bad_input(given, message):
    given = given if "--arch" in given else [*given, "--arch", "sm_90a"]
    found = CliRunner().invoke(app, ["warm", *given])
    assert isinstance(found.exception, ValueError)
    assert message in str(found.exception)


def test_the_command_without_a_gpu_lists_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(app, ["warm", "256x256"])
    assert isinstance(found.exception, ValueError)
    assert "arch: there is no GPU" in str(found.exception)
    assert "one of sm_90a, sm_100a, sm_103a" in str(found.exception)
