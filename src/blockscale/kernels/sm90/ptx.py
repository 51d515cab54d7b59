# mypy: ignore-errors
"""Single PTX instructions, or a few that must stay together, as functions on CuTe DSL values.

All are volatile: the compiler keeps them in the order in which they are written. It would sink
plain arithmetic on finished accumulators below the next wgmma, which then has to wait for it.
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

__all__ = [
    "bar_warp_sync",
    "count_up",
    "cp_async",
    "cp_async_mbarrier_arrive",
    "cvt_rn_x2",
    "fma4",
    "ld_global",
    "ld_global_pair",
    "ld_shared",
    "ld_shared_broadcast",
    "ld_shared_bytes",
    "mapa",
    "mbarrier_arrive",
    "mbarrier_arrive_cluster",
    "mbarrier_arrive_expect_tx",
    "mbarrier_arrive_if",
    "mbarrier_arrive_release_cluster",
    "mbarrier_wait_cluster",
    "mma",
    "mul",
    "nanosleep",
    "pin",
    "prefetch_l2",
    "st_async",
    "st_global",
    "st_global_pair",
    "st_shared",
    "st_shared_byte",
    "stmatrix",
    "stmatrix_trans",
    "wait_counted",
    "wgmma_bf16",
    "wgmma_descriptor",
    "wgmma_fp8",
    "wgmma_rs",
    "wgmma_wait_all",
    "wgmma_wait_group",
]

_HIGH = 0x40000040  # of a descriptor: swizzle of 128 bytes, eight rows are 1024 bytes


def _asm(code, results, args, constraints, memory=False):
    """Values of ``results`` (DSL types) from inline PTX; ``constraints`` of the arguments."""
    letters = {Float32: "=f", Int32: "=r"}
    parts = [*(letters[each] for each in results), *constraints]
    parts += ["~{memory}"] * memory
    values = [arg.ir_value() for arg in args]
    kinds = [each.mlir_type for each in results]
    result = None
    if len(kinds) == 1:
        result = kinds[0]
    elif kinds:
        result = llvm.StructType.get_literal(kinds)
    out = llvm.inline_asm(result, values, code, ",".join(parts), has_side_effects=True)
    if not kinds:
        return []
    if len(kinds) == 1:
        return [results[0](out)]
    return [each(llvm.extractvalue(kinds[i], out, [i])) for i, each in enumerate(results)]


def pin(value):
    """The value, computed here and nowhere else."""
    return _asm("mov.b32 $0, $1;", [Int32], [Int32(value)], ["r"])[0]


def nanosleep(nanoseconds) -> None:
    _asm("nanosleep.u32 $0;", [], [nanoseconds], ["r"], memory=True)


# --- products -------------------------------------------------------------------------------------


def wgmma_descriptor(address, apart: int = 16):
    """Low word of the descriptor of a matrix in shared memory: rows of 128 bytes, swizzled, and
    more of them ``apart`` bytes further where rows are longer."""
    return ((Int32(address) >> 4) & 0x3FFF) | (apart >> 4 << 16)


def wgmma_fp8(partial_acc: list, a, b) -> list:
    """Start a K block's products of 64 rows, in place of a thread's ``partial_acc``, half as many
    as there are columns. ``a``, ``b``: descriptors.
    """
    return _wgmmas(partial_acc, a, b, "k32.f32.e4m3.e4m3", (2, 2), ("p", "q"), "1, 1")


def wgmma_bf16(acc: list, a, b, steps: tuple[int, int], transposed: tuple[bool, bool]) -> list:
    """Start adding a K block of bf16 to the ``acc`` of 64 rows.

    ``steps``: how far 16 columns of K are apart in A and in B, for a descriptor; ``transposed``:
    rows in shared memory are those of K.
    """
    more = ", ".join(str(int(each)) for each in (True, True, *transposed))
    return _wgmmas(acc, a, b, "k16.f32.bf16.bf16", steps, ("q", "q"), more)


def wgmma_rs(acc: list, fragments: list, b, keeps: bool = True) -> list:
    """Add products of 64 columns of K, four wgmmas of bf16, to a thread's ``acc`` in place, or,
    unless it ``keeps`` that, write them there.

    ``fragments``: for each, four registers of the warpgroup's 64 rows; ``b``: a descriptor.
    """
    count = len(acc)
    names = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = [
        ".reg .pred p, q; .reg .b64 b; setp.ne.b32 p, 0, 0; setp.ne.b32 q, 1, 0;",
        f"mov.b64 b, {{${count + 16}, {_HIGH}}};",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        first = count + 4 * step
        left = "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"
        lines += ["add.s64 b, b, 2;"] * (step > 0)
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 "
            f"{names}, {left}, b, {'q' if keeps or step else 'p'}, 1, 1, 0;"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    code = "{ " + " ".join(lines) + " }"
    constraints = ["r"] * 17 + [str(i) for i in range(count)]
    return _asm(code, [Float32] * count, [*fragments, b, *acc], constraints, memory=True)


def mma(acc: list, left: list, right: list) -> list:
    """``acc`` of 16 x 8 and the product of 16 columns of K, by a warp: four registers of one
    operand and two of the other."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7},"
        " {$8, $9}, {$0, $1, $2, $3};"
    )
    constraints = ["r"] * 6 + [str(i) for i in range(4)]
    return _asm(code, [Float32] * 4, [*left, *right, *acc], constraints)


def _wgmmas(acc: list, a, b, kind: str, steps, keeps, more: str) -> list:
    """A group of four along K. ``keeps``: whether the first one, and the others, add to ``acc``:
    q, or overwrite them: p.
    """
    count = len(acc)
    names = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = [
        ".reg .pred p, q; .reg .b64 a, b;",
        "setp.ne.b32 p, 0, 0; setp.ne.b32 q, 1, 0;",
        f"mov.b64 a, {{${count}, {_HIGH}}}; mov.b64 b, {{${count + 1}, {_HIGH}}};",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        if step:
            lines.append(f"add.s64 a, a, {steps[0]}; add.s64 b, b, {steps[1]};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}{kind} "
            f"{names}, a, b, {keeps[step > 0]}, {more};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    code = "{ " + " ".join(lines) + " }"
    constraints = ["r", "r", *(str(i) for i in range(count))]
    return _asm(code, [Float32] * count, [a, b, *acc], constraints, memory=True)


def wgmma_wait_group(pending: int) -> None:
    """Until all but the last ``pending`` groups of wgmmas have finished."""
    _asm(f"wgmma.wait_group.sync.aligned {pending};", [], [], [], memory=True)


def wgmma_wait_all(acc: list) -> list:
    """``acc``, when all wgmmas have finished."""
    constraints = [str(i) for i in range(len(acc))]
    code = "wgmma.wait_group.sync.aligned 0;"
    return _asm(code, [Float32] * len(acc), acc, constraints, memory=True)


def bar_warp_sync() -> None:
    """What follows stays below: the compiler would move loads up between the wgmmas of a group, and
    arithmetic that waits for them. Takes no time, a warp's lanes being together."""
    _asm("bar.warp.sync 0xffffffff;", [], [], [], memory=True)


def fma4(acc: list, partial_acc: list, scales: list) -> list:
    """``acc + partial_acc * scales``, four of them; two scales, of two rows, or four."""
    which = [0, 0, 1, 1] if len(scales) == 2 else range(4)
    code = " ".join(f"fma.rn.f32 ${i}, ${4 + i}, ${8 + which[i]}, ${i};" for i in range(4))
    constraints = ["f"] * (4 + len(scales)) + [str(i) for i in range(4)]
    return _asm(code, [Float32] * 4, [*partial_acc, *scales, *acc], constraints)


def select_ge(value, least: int, chosen: list, others: list) -> list:
    """``chosen`` fp32 where ``value``, the same in all lanes, is at least so much, else
    ``others``."""
    code = f"{{ .reg .pred p; setp.ge.s32 p, $3, {least}; selp.f32 $0, $1, $2, p; }}"
    given = zip(chosen, others, strict=True)
    return [_asm(code, [Float32], [a, b, value], ["f", "f", "r"])[0] for a, b in given]


def mul(a, b):
    return _asm("mul.rn.f32 $0, $1, $2;", [Float32], [a, b], ["f", "f"])[0]


# --- shared memory --------------------------------------------------------------------------------


def ld_shared(address, offset: int, count: int = 1, kind=Float32) -> list:
    """``count`` (1, 2 or 4) fp32, or words, ``offset`` bytes after ``address``."""
    names, suffix = ", ".join(f"${i}" for i in range(count)), "f32" if kind is Float32 else "b32"
    names, suffix = (names, suffix) if count == 1 else (f"{{{names}}}", f"v{count}.{suffix}")
    code = f"ld.shared.{suffix} {names}, [${count} + {offset}];"
    return _asm(code, [kind] * count, [address], ["r"], memory=True)


def ld_shared_bytes(address, offset: int, nbytes: int):
    """One or two bytes, zero-extended."""
    code = f"ld.shared.u{8 * nbytes} $0, [$1 + {offset}];"
    return _asm(code, [Int32], [address], ["r"], memory=True)[0]


def ld_shared_broadcast(address, offset: int, lane, reader):
    """fp32 that the lane ``reader`` reads for all. If it is the one that arrives later, tools that
    look for races see that what is stored there next comes after it."""
    code = (
        "{ .reg .pred p; .reg .f32 x; mov.f32 x, 0f00000000; setp.eq.s32 p, $2, $3;"
        f" @p ld.shared.f32 x, [$1 + {offset}]; shfl.sync.idx.b32 $0, x, $3, 31, 0xffffffff; }}"
    )
    return _asm(code, [Float32], [address, lane, reader], ["r", "r", "r"], memory=True)[0]


def st_shared(address, values: list, offset: int | None = None) -> None:
    """One, two or four fp32, ``offset`` bytes after ``address``."""
    count, place = len(values), "$0" if offset is None else f"$0 + {offset}"
    names = ", ".join(f"${1 + i}" for i in range(count))
    names, kind = (names, "f32") if count == 1 else (f"{{{names}}}", f"v{count}.f32")
    _asm(
        f"st.shared.{kind} [{place}], {names};", [], [address, *values], ["r"] + ["f"] * count, True
    )


def st_shared_byte(address, value) -> None:
    _asm("st.shared.u8 [$0], $1;", [], [address, value], ["r", "r"], memory=True)


def stmatrix(address, words: list) -> None:
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    _asm(code, [], [address, *words], ["r"] * 5, memory=True)


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


def cvt_rn_x2(low, high, kind: str):
    """A word of two fp32 values rounded to "bf16" or "f16"."""
    return _asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", [Int32], [low, high], ["f", "f"])[0]


def ld_global_pair(address, offset: int, wanted, kind: str) -> list:
    """Two neighbours of "bf16", "f16" or "f32" in global memory, ``offset`` bytes after
    ``address``, as fp32; zeros, and nothing read, unless ``wanted``."""
    code = (
        "{ .reg .pred p; .reg .b32 w; .reg .b16 a, b; setp.ne.b32 p, $3, 0; mov.b32 w, 0;"
        f" @p ld.global.b32 w, [$2 + {offset}]; mov.b32 {{a, b}}, w;"
        f" cvt.f32.{kind} $0, a; cvt.f32.{kind} $1, b; }}"
    )
    if kind == "f32":
        code = (
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
            f" @p ld.global.v2.f32 {{$0, $1}}, [$2 + {offset}]; }}"
        )
    return _asm(code, [Float32] * 2, [address, wanted], ["l", "r"], memory=True)


def st_global_pair(address, offset: int, wanted, values: list, kind: str) -> None:
    """Two fp32 values as neighbours of "bf16", "f16" or "f32" in global memory, ``offset`` bytes
    after ``address``; nothing unless ``wanted``."""
    word = f"cvt.rn.{kind}x2.f32 w, $3, $2;", "b32", "w"
    if kind == "f32":
        word = "", "v2.f32", "{$2, $3}"
    code = (
        f"{{ .reg .pred p; .reg .b32 w; setp.ne.b32 p, $1, 0; {word[0]}"
        f" @p st.global.{word[1]} [$0 + {offset}], {word[2]}; }}"
    )
    _asm(code, [], [address, wanted, *values], ["l", "r", "f", "f"], memory=True)


def ld_global(address, offset: int, count: int) -> list:
    """Two or four fp32 of global memory, ``offset`` bytes after ``address``."""
    names = ", ".join(f"${i}" for i in range(count))
    code = f"ld.global.v{count}.f32 {{{names}}}, [${count} + {offset}];"
    return _asm(code, [Float32] * count, [address], ["l"], memory=True)


def st_global(address, offset: int, values: list) -> None:
    """Two or four fp32, ``offset`` bytes after ``address`` in global memory."""
    count, names = len(values), ", ".join(f"${1 + i}" for i in range(len(values)))
    code = f"st.global.v{count}.f32 [$0 + {offset}], {{{names}}};"
    _asm(code, [], [address, *values], ["l"] + ["f"] * count, memory=True)


def count_up(address) -> None:
    """Add one to a counter in global memory, when all is there that was written before."""
    _asm("red.release.gpu.global.add.u32 [$0], 1;", [], [address], ["l"], memory=True)


def wait_counted(address) -> None:
    """Until a counter is no longer zero; what was written before it was is seen."""
    code = (
        "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.u32 n, [$0];"
        " setp.eq.u32 p, n, 0; @p bra AGAIN; }"
    )
    _asm(code, [], [address], ["l"], memory=True)


# --- barriers -------------------------------------------------------------------------------------


def mbarrier_arrive_expect_tx(barrier, nbytes) -> None:
    """Arrive, by the thread that calls, and wait for so many bytes more."""
    known = isinstance(nbytes, int)
    code = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes if known else '$1'};"
    given = [barrier] if known else [barrier, nbytes]
    _asm(code, [], given, ["r"] * len(given), memory=True)


def mbarrier_arrive(barrier) -> None:
    code = "mbarrier.arrive.shared::cta.b64 _, [$0];"
    _asm(code, [], [barrier], ["r"], memory=True)


def mbarrier_arrive_if(wanted, barrier) -> None:
    """Arrive, unless ``wanted`` is 0."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    _asm(code, [], [barrier, Int32(wanted)], ["r", "r"], memory=True)


def cp_async_mbarrier_arrive(barrier) -> None:
    """Arrive when what this thread has copied is there."""
    code = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    _asm(code, [], [barrier], ["r"], memory=True)


def mbarrier_arrive_cluster(barrier, lane, ctas: int) -> None:
    """Arrive once at the barrier of each of ``ctas`` of the cluster; called by a warp's lanes."""
    code = (
        f"{{ .reg .pred p; .reg .b32 a; setp.lt.u32 p, $1, {ctas};"
        " @p mapa.shared::cluster.u32 a, $0, $1;"
        " @p mbarrier.arrive.shared::cluster.b64 _, [a]; }"
    )
    if ctas == 1:
        code = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    _asm(code, [], [barrier, lane], ["r", "r"], memory=True)


# --- another CTA's memory -----------------------------------------------------------------------


def mapa(address, cta):
    """An address of shared memory, in another CTA of the cluster."""
    code = "mapa.shared::cluster.u32 $0, $1, $2;"
    return _asm(code, [Int32], [Int32(address), cta], ["r", "r"])[0]


def st_async(place, offset: int, values: list, barrier) -> None:
    """Four fp32, whose bytes a barrier there counts when they have come. An arrival that releases
    them would have to wait here, for all that was stored before, to global memory too."""
    code = (
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        f" [$0 + {offset}], {{$2, $3, $4, $5}}, [$1];"
    )
    _asm(code, [], [place, barrier, *values], ["r", "r"] + ["f"] * 4, memory=True)


def mbarrier_arrive_release_cluster(barrier, lane, ctas: int) -> None:
    """What a warp's lanes have read may be overwritten by those who wait: once at the barrier of
    each of ``ctas`` of the cluster."""
    code = (
        f"{{ .reg .pred p; .reg .b32 a; bar.warp.sync 0xffffffff; setp.lt.u32 p, $1, {ctas};"
        " @p mapa.shared::cluster.u32 a, $0, $1;"
        " @p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }"
    )
    _asm(code, [], [barrier, lane], ["r", "r"], memory=True)


def mbarrier_wait_cluster(barrier, phase) -> None:
    """Wait for arrivals of other CTAs, and see what they wrote."""
    code = (
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
        " p, [$0], $1; @!p bra AGAIN; }"
    )
    _asm(code, [], [barrier, phase], ["r", "r"], memory=True)
