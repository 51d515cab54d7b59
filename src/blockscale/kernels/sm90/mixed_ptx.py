# mypy: ignore-errors
"""Single PTX instructions of the kernel that widens, beside those of ``ptx``."""

from __future__ import annotations

from cutlass import Float32, Int32

from .ptx import _HIGH, _asm

__all__ = [
    "cp_async",
    "cp_async_mbarrier_arrive",
    "ld_shared_bytes",
    "ld_shared_words",
    "mbarrier_arrive_if",
    "mma",
    "prefetch_l2",
    "st_shared_byte",
    "stmatrix_trans",
    "wgmma_rs",
]


def wgmma_rs(sums: list, fragments: list, b) -> list:
    """Add products of 64 columns of K, four wgmmas of bf16, to a thread's ``sums`` in place.

    ``fragments``: for each, four registers of the warpgroup's 64 rows; ``b``: a descriptor.
    """
    count = len(sums)
    names = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = [
        f".reg .b64 b; mov.b64 b, {{${count + 16}, {_HIGH}}};",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        first = count + 4 * step
        left = "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"
        lines += ["add.s64 b, b, 2;"] * (step > 0)
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 "
            f"{names}, {left}, b, 1, 1, 1, 0;"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    code = "{ " + " ".join(lines) + " }"
    constraints = ["r"] * 17 + [str(i) for i in range(count)]
    return _asm(code, [Float32] * count, [*fragments, b, *sums], constraints, memory=True)


def mma(sums: list, left: list, right: list) -> list:
    """``sums`` of 16 x 8 and the product of 16 columns of K, by a warp: four registers of one
    operand and two of the other."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7},"
        " {$8, $9}, {$0, $1, $2, $3};"
    )
    constraints = ["r"] * 6 + [str(i) for i in range(4)]
    return _asm(code, [Float32] * 4, [*left, *right, *sums], constraints)


# --- shared memory --------------------------------------------------------------------------------


def ld_shared_words(address, offset: int, count: int) -> list:
    """``count`` (1, 2 or 4) words ``offset`` bytes after ``address``."""
    names = ", ".join(f"${i}" for i in range(count))
    names, kind = (names, "b32") if count == 1 else (f"{{{names}}}", f"v{count}.b32")
    code = f"ld.shared.{kind} {names}, [${count} + {offset}];"
    return _asm(code, [Int32] * count, [address], ["r"], memory=True)


def ld_shared_bytes(address, offset: int, nbytes: int):
    """One or two bytes, zero-extended."""
    code = f"ld.shared.u{8 * nbytes} $0, [$1 + {offset}];"
    return _asm(code, [Int32], [address], ["r"], memory=True)[0]


def st_shared_byte(address, value) -> None:
    _asm("st.shared.u8 [$0], $1;", [], [address, value], ["r", "r"], memory=True)


def stmatrix_trans(address, words: list) -> None:
    """Four 8 x 16-byte matrices, transposed; a lane gives the address of a row."""
    code = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    _asm(code, [], [address, *words], ["r"] * 5, memory=True)


def cp_async(target, source, nbytes: int, wanted) -> None:
    """``nbytes`` (4 or 8) of global memory to shared memory, or zeros unless ``wanted`` is 1."""
    code = (
        "{ .reg .b32 n; mul.lo.u32 n, $2, "
        f"{nbytes}; cp.async.ca.shared.global [$0], [$1], {nbytes}, n; }}"
    )
    _asm(code, [], [target, source, wanted], ["r", "l", "r"], memory=True)


def prefetch_l2(address) -> None:
    """Bring what lies there in global memory to the L2 cache."""
    _asm("prefetch.global.L2 [$0];", [], [address], ["l"], memory=True)


def mbarrier_arrive_if(wanted, barrier) -> None:
    """Arrive, unless ``wanted`` is 0."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    _asm(code, [], [barrier, Int32(wanted)], ["r", "r"], memory=True)


def cp_async_mbarrier_arrive(barrier) -> None:
    """Arrive when what this thread has copied is there."""
    code = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    _asm(code, [], [barrier], ["r"], memory=True)
