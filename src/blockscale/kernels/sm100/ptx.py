# mypy: ignore-errors
"""Single PTX instructions of Blackwell as functions on CuTe DSL values; all are volatile.

Addresses are integers: 64 bits in global, 32 in shared memory. Those of Tensor Memory have the lane
in the upper half and the column in the lower one. ``ctas``: blocks that work together, 1 or 2.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm

__all__ = [
    "EVEN",
    "allocate",
    "arrive",
    "arrive_first",
    "ask",
    "commit",
    "copy_scales",
    "expect",
    "free",
    "load_box",
    "load_sums",
    "load_words",
    "map_address",
    "matrix",
    "multiply",
    "multiply_float",
    "read_answer",
    "round_pair",
    "store_words",
    "sum_float",
    "sums_known",
    "sums_read",
    "wait",
    "wait_for_stage",
    "widen",
]

EVEN = 0xFEFFFFFF  # clears the last bit of the block in an address of its shared memory
_LETTERS = {Float32: "f", Int32: "r", Int64: "l"}
# High words of descriptors of matrices in shared memory, whose bit 14 is set on Blackwell:
_OPERAND = 2 << 29 | 1 << 14 | 1024 >> 4  # swizzle of 128 bytes, eight rows are 1024 bytes
_SCALES = 1 << 14 | 128 >> 4  # no swizzle, eight rows are 128 bytes


def _asm(code: str, results: list, args: list, kinds: list) -> list:
    """Values of DSL types ``results`` from inline PTX; ``kinds``: DSL types of ``args``."""
    constraints = [f"={_LETTERS[each]}" for each in results]
    constraints += [_LETTERS[each] for each in kinds] + ["~{memory}"]
    values = [kind(arg).ir_value() for kind, arg in zip(kinds, args, strict=True)]
    types = [each.mlir_type for each in results]
    result = None
    if len(types) == 1:
        result = types[0]
    elif types:
        result = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(result, values, code, ",".join(constraints), has_side_effects=True)
    if len(types) == 1:
        return [results[0](out)]
    return [each(llvm.extractvalue(types[i], out, [i])) for i, each in enumerate(results)]


def _words(code: str, *args) -> None:
    _asm(code, [], list(args), [Int32] * len(args))


# --- loads ----------------------------------------------------------------------------------------


def map_address(atom):
    """Of the tensor map that an atom has."""
    kind = ir.Type.parse("!cute.ptr<i64, generic, align<64>>")
    return cute_nvgpu.get_tma_desc_addr(
        kind, cute_nvgpu.atom_make_exec_tma(atom._trait.value)
    ).toint()


def load_box(to, map, position, barrier, mask, ctas: int) -> None:
    """Load a box by TMA; ``position``: row and column of its first element. ``mask``: the blocks
    that get it at this place, or None. Of two that work together, the even one's barrier is told.
    """
    row, column = position
    code = "cp.async.bulk.tensor.2d"
    code += f".cta_group::{ctas}" if ctas > 1 else ""
    code += ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    args = [to, map, column, row, barrier]
    if mask is None:
        code += " [$0], [$1, {$2, $3}], [$4];"
    else:
        code += ".multicast::cluster [$0], [$1, {$2, $3}], [$4], m;"
        code = f"{{ .reg .b16 m; cvt.u16.u32 m, $5; {code} }}"
        args.append(mask)
    _asm(code, [], args, [Int32, Int64, Int32, Int32, Int32, Int32][: len(args)])


# --- barriers -------------------------------------------------------------------------------------


def expect(barrier, nbytes: int) -> None:
    """Arrive, by the thread that calls, and wait for so many bytes more."""
    _words(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};", barrier)


def wait_for_stage(barrier, phase) -> None:
    """Until a phase is over, of what only TMA and the tensor cores touch: they read no cache that
    would have to forget what other blocks have changed, as with ``wait``."""
    wait(barrier, phase, 1)


def wait(barrier, phase, blocks: int) -> None:
    """Until a phase is over, with arrivals of other blocks where there are ``blocks``."""
    scope = ".acquire.cluster" if blocks > 1 else ""
    _words(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity"
        f"{scope}.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }}",
        barrier,
        phase,
    )


def arrive(barrier, rank, ctas: int) -> None:
    """Of one thread, at the barrier of this block, or of the even one of two."""
    if ctas == 1:
        _words("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier)
        return
    _words(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }",
        barrier,
        rank & ~1,
    )


def commit(barrier, mask, ctas: int) -> None:
    """Arrive when all that the thread has begun in Tensor Memory is done. ``mask``: of blocks whose
    barriers at this place are told; None: this one's."""
    code = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    if mask is None:
        _words(code + ".b64 [$0];", barrier)
        return
    code = f"cvt.u16.u32 m, $1; {code}.multicast::cluster.b64 [$0], m;"
    _words(f"{{ .reg .b16 m; {code} }}", barrier, mask)


def arrive_first(barrier, blocks: int) -> None:
    """Of one thread, at the barrier of the cluster's first block."""
    arrive(barrier, Int32(0), blocks)


# --- tiles of clusters that wait for their launch -------------------------------------------------


def ask(to, barrier, blocks: int) -> None:
    """For a cluster to be cancelled: 16 bytes that say which, in each of ``blocks``, and told to
    their barriers."""
    every = ".multicast::cluster::all" if blocks > 1 else ""
    _words(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        f"{every}.b128 [$0], [$1];",
        to,
        barrier,
    )


def read_answer(address, blocks: int):
    """Which of the clusters, of ``blocks``; -1 for none. Another answer may be asked for after."""
    code = (
        "{ .reg .b128 q; .reg .pred p; .reg .b32 x; ld.shared.b128 q, [$1];"
        " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, q; mov.b32 x, -1;"
        " @p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 x, q;"
        f" @p div.u32 x, x, {blocks}; mov.b32 $0, x; fence.proxy.async.shared::cta; }}"
    )
    return _asm(code, [Int32], [address], [Int32])[0]


# --- Tensor Memory --------------------------------------------------------------------------------


def allocate(where, columns: int, ctas: int) -> None:
    """By a warp: the address of ``columns`` into shared memory."""
    group = f"cta_group::{ctas}.sync.aligned"
    _words(
        f"tcgen05.alloc.{group}.shared::cta.b32 [$0], {columns};"
        f" tcgen05.relinquish_alloc_permit.{group};",
        where,
    )


def free(address, columns: int, ctas: int) -> None:
    _words(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, {columns};", address)


def matrix(address, apart: int = 16):
    """Low word of the descriptor of a matrix in shared memory: rows of 128 bytes, and more of them
    ``apart`` bytes further where rows are longer."""
    return (Int32(address) >> 4) & 0x3FFF | apart >> 4 << 16


def copy_scales(to, source, ctas: int) -> None:
    """128 x 4 scales from shared memory, once for each 32 lanes. ``source``: of ``matrix``."""
    _words(
        f"{{ .reg .b64 s; mov.b64 s, {{$1, {_SCALES}}};"
        f" tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [$0], s; }}",
        to,
        source,
    )


def multiply(sums, a, b, shape: int, a_scale, b_scale, add, kind: str, ctas: int) -> None:
    """Start to add to ``sums``, or to overwrite them unless ``add``. ``a``, ``b``: of ``matrix``;
    ``shape``: an instruction descriptor; scales: in Tensor Memory."""
    _words(
        "{ .reg .pred p; .reg .b64 a, b; .reg .b32 i; setp.ne.b32 p, $5, 0;"
        f" mov.b64 a, {{$1, {_OPERAND}}}; mov.b64 b, {{$2, {_OPERAND}}}; mov.b32 i, {shape};"
        f" tcgen05.mma.cta_group::{ctas}.kind::{kind} [$0], a, b, i, [$3], [$4], p; }}",
        sums,
        a,
        b,
        a_scale,
        b_scale,
        add,
    )


def load_sums(address, columns: int, parts: int = 1, apart: int = 0) -> list:
    """fp32 of a lane for each thread, 32 columns by an instruction; all are there. Of several
    ``parts`` so many columns each, ``apart`` from its start to the next one's."""
    code, count = "", columns * parts
    for first in range(0, count, 32):
        names = ", ".join(f"${i}" for i in range(first, first + 32))
        where = first // columns * apart + first % columns
        code += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{names}}}, [${count} + {where}]; "
    code += "tcgen05.wait::ld.sync.aligned;"
    return _asm(code, [Float32] * count, [address], [Int32])


def sums_read() -> None:
    """What the thread has loaded was read before what others do once they know."""
    _words("tcgen05.fence::before_thread_sync;")


def sums_known() -> None:
    """What others have done before this thread knew of it."""
    _words("tcgen05.fence::after_thread_sync;")


# --- values ---------------------------------------------------------------------------------------


def multiply_float(a, b):
    return _asm("mul.rn.f32 $0, $1, $2;", [Float32], [a, b], [Float32] * 2)[0]


def sum_float(a, b):
    return _asm("add.rn.f32 $0, $1, $2;", [Float32], [a, b], [Float32] * 2)[0]


def round_pair(low, high, kind: str):
    """A word of two fp32 values rounded to "bf16" or "f16"."""
    return _asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", [Int32], [low, high], [Float32] * 2)[0]


def widen(word, kind: str) -> list:
    """fp32 values of a word of two."""
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.KIND $0, l; cvt.f32.KIND $1, h; }"
    return _asm(code.replace("KIND", kind), [Float32] * 2, [word], [Int32])


def store_words(address, words: list) -> None:
    """16 bytes to shared memory; ``words``: four, or fp32 values."""
    kind = type(words[0])
    code = f"st.shared.v4.{'f32' if kind is Float32 else 'b32'} [$0], {{$1, $2, $3, $4}};"
    _asm(code, [], [address, *words], [Int32] + [kind] * 4)


def load_words(address, wanted) -> list:
    """16 bytes of global memory; zeros, and nothing read, unless ``wanted``."""
    code = "{ .reg .pred p; setp.ne.b32 p, $5, 0; " + " ".join(
        f"mov.b32 ${i}, 0;" for i in range(4)
    )
    code += " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    return _asm(code, [Int32] * 4, [address, wanted], [Int64, Int32])
