"""``import blockscale`` imports no torch, and no order of imports changes what is there then."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import blockscale as bs

MODULES = {"checkpoint", "debug", "distributed", "nn"}

ALONE = """
import sys
import blockscale as bs
assert "torch" not in sys.modules
assert set(bs.__all__) <= set(dir(bs))
assert bs.formats["mxfp8"].name == "mxfp8" and bs.Seed(7)
assert not hasattr(bs, "nonsense")
from importlib.util import find_spec
assert find_spec("torch").loader.is_package("torch")  # asked for, as transformers do, not imported
assert "torch" not in sys.modules
"""

# The file is read first: torch finds what is registered with it, and nobody names what is ours.
AFTER = """
import sys
from importlib import import_module
from types import ModuleType
import torch
q = torch.load(sys.argv[1], weights_only=True)
assert torch.cat([q, q]).shape == (64, 32)
assert torch.ops.blockscale.dequantize and torch.ops.blockscale.linear
assert torch.__spec__.loader is torch.__loader__
assert not any(type(each).__module__ == "blockscale.arrival" for each in sys.meta_path)
assert "arrival" not in type(torch.__loader__).__module__
bs = sys.modules["blockscale"]
for name in {*bs.__all__} - {"checkpoint", "debug", "distributed", "nn"}:
    assert not isinstance(getattr(bs, name), ModuleType), name
for name in ("gemm", "gemm_quantize", "gptq", "quantize", "warm"):
    assert getattr(import_module(f"blockscale.{name}"), name) is getattr(bs, name)
"""

#: What a process imports first.
FIRST = [
    "import torch, blockscale",
    "import blockscale, torch",
    "import blockscale.nn",
    "import blockscale.quantize as m; assert m is sys.modules['blockscale.quantize'].quantize",
    "from blockscale import quantize; assert quantize.__name__ == 'quantize'",
    "from blockscale.tensor import ScaledTensor",
    "import blockscale.vllm.served",  # of a package that needs no torch itself
    "import pickle; f = pickle.loads(bytes.fromhex(sys.argv[2]))\n"
    "import blockscale; assert f is blockscale.quantize",
]


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_no_torch():
    run(ALONE)


@pytest.mark.parametrize("first", FIRST, ids=[each.partition(";")[0] for each in FIRST])
def test_any_order_of_imports(first, tmp_path):
    file = tmp_path / "q.pt"
    torch.save(bs.quantize(torch.ones(32, 32), "mxfp8"), file)
    run(f"import sys\n{first}\n{AFTER}", str(file), pickle.dumps(bs.quantize).hex())


def test_names_are_what_type_checkers_read():
    """``__init__`` has the imports for them; ``torch_side`` those that run."""
    tree = ast.parse(Path(bs.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    told = {}
    for node in imports:
        home = ".".join(filter(None, ["blockscale", node.module]))
        for each in node.names:
            inside = f"{home}.{each.name}" if node.module is None else home
            module = importlib.import_module(inside)
            told[each.name] = module if node.module is None else getattr(module, each.name)
    assert set(bs.__all__) <= set(told)
    for name in bs.__all__:
        assert getattr(bs, name) is told[name], name
        assert isinstance(told[name], ModuleType) == (name in MODULES), name


def test_functions_are_pickled_and_copied_as_themselves():
    for name in ("gemm", "gptq", "quantize", "warm"):
        function = getattr(bs, name)
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        bs.nonsense  # noqa: B018
