"""What another framework takes works where there is no torch."""

import subprocess
import sys

import pytest

# A process in which torch cannot be imported.
WITHOUT = """
import sys
sys.modules["torch"] = None
import blockscale
"""

FORMULAS = """
import ml_dtypes, numpy as np
from blockscale import rounding
from blockscale.formats import formats
from blockscale.layouts import Grouped, layouts

fmt, x = formats["mxfp8"], np.linspace(-3, 3, 128, dtype=np.float32).reshape(1, 128)
bits = rounding.float32_bits(x) & 0x7FFFFFFF
scale, inverse = rounding.block_scale(bits.max(-1, keepdims=True), fmt, "rceil")
codes = rounding.encode(rounding.from_float32_bits(
    rounding.multiply(rounding.float32_bits(x), inverse)), fmt.element)
assert rounding.pack(codes, fmt.element).dtype == fmt.element.numpy_dtype
values = rounding.decode(codes, fmt.element) * scale.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
assert np.abs(values.astype(np.float32) - x).max() < 3 / 16
nibbles = rounding.encode(x, formats["nvfp4"].element, seed=1)
packed = rounding.pack(nibbles, formats["nvfp4"].element)
assert (rounding.unpack(packed, formats["nvfp4"].element) == nibbles).all()

scales = np.arange(130 * 5, dtype=np.uint8).reshape(130, 5)
for name in ("compact", "tcgen05", "packed"):
    layout = layouts[name]
    stored = layout.swizzle(scales)
    assert stored.shape == layout.stored_shape(scales.shape), name
    assert (layout.unswizzle(stored, scales.shape, scales.dtype) == scales).all(), name
ends = np.array([3, 3, 130], dtype=np.int32)
grouped = Grouped(layouts["tcgen05"])
assert (grouped.unswizzle(grouped.swizzle(scales, ends), scales.shape, scales.dtype, ends)
        == scales).all()
"""

KERNELS = """
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.builders import BUILDERS, build_kernel
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.quantizers import config as quantizer
from blockscale.kernels.sm90 import config as sm90
from blockscale.kernels.sm100 import config as sm100
from importlib import import_module

for name in {*BUILDERS.values(), *(each.rpartition(".")[0] for each in BUILDERS)}:
    import_module(f"blockscale.kernels.{name}")
chosen = [
    quantizer.choose_config((64, 256), [(0, 512)], BFLOAT16, quantizer.Request("mxfp8")),
    sm90.choose_config((64, 128, 256), Epilogue()),
    sm100.choose_config((128, 128, 256), ("nvfp4", "nvfp4"), Epilogue()),
]
assert build_kernel(chosen[1]) is not None
"""

LOOPS = """
import numpy as np
from blockscale.formats import formats
from blockscale.kernels.cpu import compiled, encoding
from blockscale.kernels.cpu.spec import Strided, geometry
from blockscale.kernels.common.spec import specify

fmt, x = formats["mxfp8"], np.arange(64, dtype=np.float32)
grid = geometry(Strided((1, 1, 64), 64, 64), fmt, -1)
constants = specify(fmt, "rceil", "propagate")
data, scale, none = np.empty(64, np.uint8), np.empty(2, np.uint8), np.empty(0, np.int32)
items = x.view(np.int32)
scratch = encoding.make_scratch(items, grid, constants, False)
compiled.quantize_tiles(
    items, data, scale, none, grid, constants, 0x3F800000, none, None, (0, 0, 0), scratch, 0,
    grid.tiles)
assert scale.tolist() == [124, 125], scale  # 31 / 448 and 63 / 448, rounded up to powers of two
"""


NAMES = """
import blockscale as bs
wanting = []
for name in bs.__all__:
    try:
        getattr(bs, name)
    except ModuleNotFoundError as error:
        assert f"blockscale.{name} needs PyTorch" in str(error) and "pip install" in str(error)
        wanting.append(name)
assert {"ScaledTensor", "checkpoint", "nn", "quantize", "warm"} <= set(wanting), wanting
assert not {"Format", "Hadamard", "Quantization", "Seed", "formats", "layouts"} & set(wanting)
try:
    from blockscale import quantize
except ImportError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError(quantize)
assert not hasattr(bs, "nonsense")
"""


@pytest.mark.parametrize(
    "code", [FORMULAS, KERNELS, LOOPS, NAMES], ids=["formulas", "kernels", "loops", "names"]
)
def test_torch_is_not_needed(code):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
