"""``blockscale emulate quantize`` from the command line."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

# not imported: it would teach numpy the name "bfloat16", which other tests rely on being unknown
pytestmark = pytest.mark.skipif(
    not (find_spec("cutlass") and find_spec("tvm_ffi")), reason="CuTe DSL is not installed"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from blockscale.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_bytes_are_the_references():
    found = run(
        *("emulate", "quantize", "--arch", "sm_90a", "--shape", "129x160", "--axis", "both"),
        *("--layout", "tcgen05", "--json"),
    )
    assert found.returncode == 0, found.stderr
    outputs = json.loads(found.stdout)["outputs"]
    assert [o["name"] for o in outputs] == [
        "data of rows",
        "scale of rows",
        "data of columns",
        "scale of columns",
    ]
    assert all(o["equal"] is True for o in outputs)
    assert [o["shape"] for o in outputs] == [[129, 160], [2048], [160, 160], [2048]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "129"), "shape: got '129'"),
        (("--format", "mxfp9"), "format: got 'mxfp9'"),
        (("--format", "mxfp6_e2m3"), "6-bit"),
        (("--axis", "diagonal"), "axis: got 'diagonal'"),
        (("--arch", "sm_80"), "kernels are compiled for sm_90a, sm_100a and sm_103a"),
        (("--arch", "sm_100"), "Choose sm_100a"),
    ],
)
def test_bad_input(arguments, message):
    found = run("emulate", "quantize", *arguments)
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr
