"""CUTLASS's examples 72a, 72b, 72c and 70: GEMMs for sm_100, three block-scaled, with their main().

main() fills the operands, builds tensor maps and arguments, launches the kernel and compares what
it wrote with a reference on the host, bit for bit; what it prints of that is the answer.

The problems are of three and six tiles with edges that are none of a tile's, and clusters of the
grid are more than may start at once, so that some go on to a tile that they cancelled.
"""

from __future__ import annotations

import sys
from functools import partial

from .kernel import Launch
from .program import Program, run_program

VERSION = "dcf215af68a2d08d305076c152a06f201728cd53"  # v4.7.0
FLAGS = (
    "nvcc 13.0.88 -std=c++17 -O2 -shared -Xcompiler -fPIC -cudart none --no-compress -lineinfo "
    "--expt-relaxed-constexpr -gencode arch=compute_100a,code=compute_100a, with the folders "
    "include, tools/util/include and examples/common"
)


def run(name: str, arguments: tuple[str, ...], launch: Launch) -> bool:
    code, said = run_program(launch.folder / f"{name}.so", arguments, launch)
    passed = code == 0 and "Disposition: Passed" in said
    if not passed:
        print(f"{name} left with {code} and said:\n{said}", file=sys.stderr)
    return passed


def example(folder: str, name: str, problem: str) -> Program:
    """The kernel of ``name``.cu, for a problem that its options describe."""
    options = (*problem.split(), "--iterations=0")
    made = f"examples/{folder}/{name}.cu as a shared library: {FLAGS}; run with {' '.join(options)}"
    whole = partial(run, name, options)
    return Program(name, "CUTLASS", VERSION, "sm_100a", "device_kernel", made, whole)


SCALED = "72_blackwell_narrow_precision_gemm"
KERNELS = [
    example(SCALED, "72a_blackwell_nvfp4_bf16_gemm", "--m=712 --n=296 --k=1056 --beta=0.5"),
    example(SCALED, "72b_blackwell_nvfp4_nvfp4_gemm", "--m=384 --n=256 --k=1056 --beta=0.5"),
    example(SCALED, "72c_blackwell_mixed_mxfp8_bf16_gemm", "--m=712 --n=296 --k=896 --beta=0.5"),
    example("70_blackwell_gemm", "70_blackwell_fp8_gemm", "--m=720 --n=208 --k=224 --beta=0.5"),
]
