"""Functions of JAX that call kernels, lowered for GPUs that are not here, with the code that torch
runs."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import partial

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import cutlass.jax
import jax
import jax.export
import jax.numpy as jnp

import blockscale as bs
import blockscale.jax as bsj
from blockscale.jax import target

pytestmark = pytest.mark.kernels

ARCHS = ("sm_90a", "sm_100a")


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def of_weights(function, a, b):
    """``function`` of both, quantized inside."""
    return lambda x, w: function(bsj.quantize(x, a), bsj.quantize(w, b).mT)


def in_columns(g, x, ends):
    a, b = (bsj.quantize(each, axis=-2, offsets=ends, k_major=True) for each in (g, x))
    return bsj.grouped_gemm(a.mT, b, ends)


LOWERED = {  # what is lowered, of which shapes, and the kernels that it calls, by architecture
    "quantize": (bsj.quantize, (shaped(64, 256),), (1, 1)),
    "nvfp4": (partial(bsj.quantize, format="nvfp4"), (shaped(64, 256),), (2, 2)),
    "both axes": (bsj.quantize_both, (shaped(2, 64, 256),), (1, 1)),
    "vmap": (jax.vmap(bsj.quantize), (shaped(2, 64, 256),), (1, 1)),
    "back": (lambda x: bsj.dequantize(bsj.quantize(x)), (shaped(64, 256),), (2, 2)),
    "gemm": (of_weights(bsj.gemm, "mxfp8", "mxfp8"), (shaped(200, 256), shaped(128, 256)), (4, 3)),
    "tall": (of_weights(bsj.gemm, "mxfp8", "mxfp8"), (shaped(300, 256), shaped(128, 256)), (5, 3)),
    "few rows": (
        lambda x, w: bsj.gemm(x, bsj.quantize(w).mT),
        (shaped(4, 256), shaped(8192, 256)),
        (2, 1),
    ),
    "fp8": (
        of_weights(bsj.gemm, "fp8_1x128", "fp8_128x128"),
        (shaped(200, 256), shaped(128, 256)),
        (3, 4),  # on Blackwell XLA multiplies values
    ),
    "groups": (
        lambda x, w, ends: bsj.grouped_gemm(bsj.quantize(x), bsj.quantize(w).mT, ends),
        (shaped(200, 256), shaped(3, 96, 256), shaped(3, dtype=jnp.int32)),
        (4, 3),
    ),
    "both axes in groups": (
        lambda x, ends: bsj.quantize_both(x, "mxfp4", offsets=ends),
        (shaped(200, 256), shaped(3, dtype=jnp.int32)),
        (1, 1),
    ),
    "groups along K": (
        in_columns,
        (shaped(200, 96), shaped(200, 256), shaped(3, dtype=jnp.int32)),
        (5, 3),  # on Hopper both are written in bf16
    ),
    "steps": (
        lambda x, step: bsj.quantize(x, seed=bsj.Seed(1, step)),
        (shaped(64, 256), shaped(dtype=jnp.int32)),
        (1, 1),
    ),
    "gradients": (
        jax.grad(lambda w, x: bsj.linear(x, w).astype(jnp.float32).sum(), (0, 1)),
        (shaped(256, 96), shaped(64, 256)),
        None,
    ),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name, arch, monkeypatch):
    """For a GPU that is not here, with the machine code in it."""
    function, given, kernels = LOWERED[name]
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    checks = cutlass.jax.get_export_disabled_safety_checks()
    with warnings.catch_warnings():
        if (name, arch) in {("few rows", "sm_100a"), ("fp8", "sm_100a")}:
            warnings.simplefilter("ignore", bs.FallbackWarning)
        exported = jax.export.export(
            jax.jit(partial(function)), platforms=["cuda"], disabled_checks=checks
        )(*given)
    text = str(exported.mlir_module())
    found = text.count("custom_call @CuteDSLRT")
    assert found == kernels[ARCHS.index(arch)] if kernels else found >= 3
    assert text.count("\\7FELF") == 2 * found  # of the host and of the GPU


def test_says_once_what_has_no_kernel(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(target, "_warned", set())
    x = jnp.ones((32, 64))
    with pytest.warns(bs.FallbackWarning, match="6-bit elements; XLA computes it"):
        bsj.quantize(x, "mxfp6_e2m3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bsj.quantize(x, "mxfp6_e2m3")


def test_unknown_architectures(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90")
    monkeypatch.setattr(target, "_warned", set())
    target._named.cache_clear()
    with pytest.warns(bs.FallbackWarning, match="Choose sm_90a; XLA computes it"):
        bsj.quantize(jnp.ones((32, 64)))


SAME_CODE = """
import os, re, sys, warnings
from pathlib import Path

arch, folder, least = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_PTX="1", CUTE_DSL_DUMP_DIR=str(folder))
import cutlass.jax, jax, jax.export, jax.numpy as jnp
import blockscale.jax as bsj
from blockscale import Hadamard
from blockscale.emulator.host.hostcode import settings
from blockscale.jax import launch
from blockscale.kernels.common.builders import build_kernel

def of(format, weights):
    return lambda x, w: bsj.gemm(bsj.quantize(x, format), bsj.quantize(w, weights).mT)

def groups(x, w):
    ends = jnp.arange(1, 9, dtype=jnp.int32) * 16
    w = bsj.quantize(w, "nvfp4", global_scale=1.0)
    return bsj.grouped_gemm(bsj.quantize(x, "nvfp4"), w.mT, ends)

def wgrad(format):
    def product(g, x):
        ends = jnp.array([40, 40, 173], jnp.int32)
        a, b = (bsj.quantize(each, format, -2, offsets=ends, k_major=True) for each in (g, x))
        return a.dequantize(), bsj.grouped_gemm(a.mT, b, ends)
    return product

def columns(x, w):
    back = [bsj.dequantize(each) for each in bsj.quantize_both(x, "mxfp8", pad=True)]
    back += [bsj.dequantize(bsj.quantize(w, "nvfp4", axis=-2, seed=1))]
    return back, bsj.dequantize(bsj.quantize(x, "mxfp4", layout="tcgen05", pad=True), jnp.float16)

def further(x, w):  # of three shapes, as files of PTX are named by these
    drawn = Hadamard(32, bsj.Seed(3, jnp.int32(5)))
    eden = {"scaling": "ms_eden", "seed": 1, "hadamard": Hadamard(16, 5)}
    return (
        bsj.quantize(x, "nvfp4", -2, hadamard=drawn, seed=2),
        bsj.quantize(w, "nvfp4", **eden),
        bsj.quantize_both(w[:16], "nvfp4", square=True, scaling="four_over_six"),
    )

warnings.simplefilter("ignore")  # of FP8 on Blackwell
configs, describe, seen = [], launch.describe_kernel, set()
launch.describe_kernel = lambda config: (configs.append(config), describe(config))[1]

def codes(folder):
    # names of kernels tell how they were described
    texts = [each.read_text() for each in folder.glob("*.ptx")]
    return {re.sub(r"kernel_cutlass\\w*", "kernel", text) for text in texts}

def into(name):
    settings().dump_dir = str(folder / name)
    os.mkdir(settings().dump_dir)
    return folder / name

for name, function, x, w in (
    ("nvfp4", of("nvfp4", "nvfp4"), (200, 256), (128, 256)),
    ("fp8", of("fp8_1x128", "fp8_128x128"), (200, 256), (128, 256)),
    ("tall", lambda x, w: of("mxfp8", "mxfp8")(x, w).T, (600, 256), (128, 256)),
    ("few", lambda x, w: bsj.gemm(x, bsj.quantize(w, "mxfp4", axis=-1).mT), (3, 256), (96, 256)),
    ("odd", of("mxfp8", "mxfp8"), (40, 1056), (72, 1056)),
    ("fp8 by 4", of("fp8_1x128", "mxfp4"), (40, 384), (72, 384)),
    ("columns", columns, (96, 40), (2, 48, 36)),
    ("groups", groups, (128, 256), (8, 96, 256)),
    ("further", further, (96, 64), (32, 64)),
    ("wgrad", wgrad("mxfp8"), (200, 96), (200, 256)),
    ("wgrad of fp8", wgrad("fp8_1x128"), (200, 96), (200, 256)),
):
    configs.clear()
    ours = into(name)
    jax.export.export(
        jax.jit(function), platforms=["cuda"],
        disabled_checks=cutlass.jax.get_export_disabled_safety_checks(),
    )(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w)])
    expected = set()
    for i, config in enumerate(dict.fromkeys(configs)):
        torchs = into(f"{name} {i}")
        build_kernel(config)
        expected |= codes(torchs)
    assert codes(ours) == expected, name
    seen |= expected
assert len(seen) >= least, len(seen)
"""


@pytest.mark.parametrize(("arch", "least"), [("sm_90a", 39), ("sm_100a", 36)])
def test_same_code(arch, least, tmp_path):
    """What JAX runs is what torch runs: the PTX of each kernel, line by line."""
    command = [sys.executable, "-c", SAME_CODE, arch, str(tmp_path), str(least)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
