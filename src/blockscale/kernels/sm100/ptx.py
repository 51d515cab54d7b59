# mypy: ignore-errors
"""Single PTX instructions of Blackwell as functions on CuTe DSL values; all are volatile.

Addresses are integers: 64 bits in global, 32 in shared memory. Those of Tensor Memory have the lane
in the upper half and the column in the lower one. ``ctas`` is 1, or 2 for a pair (``cta_group``).
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm

__all__ = [
    "EVEN_CTA",
    "add",
    "clc_query",
    "clc_try_cancel",
    "cvt_rn_x2",
    "fence_after_thread_sync",
    "fence_before_thread_sync",
    "ld_global_v4",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_arrive_first_cta",
    "mbarrier_wait",
    "mbarrier_wait_cta",
    "mul",
    "smem_descriptor",
    "st_shared_v4",
    "tcgen05_alloc",
    "tcgen05_commit",
    "tcgen05_cp_scales",
    "tcgen05_dealloc",
    "tcgen05_ld",
    "tcgen05_mma",
    "tensor_map_address",
    "tma_load",
    "widen",
]

EVEN_CTA = 0xFEFFFFFF  # clears the last bit of the CTA's rank in an address of shared memory
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


def tensor_map_address(atom):
    """The address of an atom's tensor map."""
    kind = ir.Type.parse("!cute.ptr<i64, generic, align<64>>")
    return cute_nvgpu.get_tma_desc_addr(
        kind, cute_nvgpu.atom_make_exec_tma(atom._trait.value)
    ).toint()


def tma_load(to, map, position, barrier, mask, ctas: int) -> None:
    """Load a box by TMA, whose first element is at ``position``: row and column. It goes to the
    same address in all CTAs of ``mask``, or None for this one. In a pair it arrives at the even
    CTA's mbarrier.
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


def mbarrier_arrive_expect_tx(barrier, nbytes: int) -> None:
    """Arrive, and let the phase wait for so many bytes more."""
    _words(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {nbytes};", barrier)


def mbarrier_wait_cta(barrier, phase) -> None:
    """Wait until a phase is over, with the scope of a CTA. That is enough for stages, which only
    TMA and the tensor cores read and write: no thread reads what another CTA has written."""
    mbarrier_wait(barrier, phase, 1)


def mbarrier_wait(barrier, phase, ctas: int) -> None:
    """Wait until a phase is over, at which threads of ``ctas`` CTAs arrive."""
    scope = ".acquire.cluster" if ctas > 1 else ""
    _words(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity"
        f"{scope}.shared::cta.b64 p, [$0], $1; @!p bra AGAIN; }}",
        barrier,
        phase,
    )


def mbarrier_arrive(barrier, rank, ctas: int) -> None:
    """Arrive, by one thread, at this CTA's mbarrier, or at that of the pair's even CTA."""
    if ctas == 1:
        _words("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier)
        return
    _words(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }",
        barrier,
        rank & ~1,
    )


def tcgen05_commit(barrier, mask, ctas: int) -> None:
    """Arrive when all MMAs and copies that the thread has issued are done: at the mbarriers of all
    CTAs of ``mask``, or None for this one's."""
    code = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    if mask is None:
        _words(code + ".b64 [$0];", barrier)
        return
    code = f"cvt.u16.u32 m, $1; {code}.multicast::cluster.b64 [$0], m;"
    _words(f"{{ .reg .b16 m; {code} }}", barrier, mask)


def mbarrier_arrive_first_cta(barrier, cluster_size: int) -> None:
    """Arrive, by one thread, at the mbarrier of the cluster's first CTA."""
    mbarrier_arrive(barrier, Int32(0), cluster_size)


# --- cluster launch control -----------------------------------------------------------------------


def clc_try_cancel(to, barrier, cluster_size: int) -> None:
    """Ask for the launch of a cluster to be cancelled. The response, 16 bytes, goes to ``to`` in
    each CTA of this cluster, and arrives at their mbarriers."""
    every = ".multicast::cluster::all" if cluster_size > 1 else ""
    _words(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        f"{every}.b128 [$0], [$1];",
        to,
        barrier,
    )


def clc_query(address, cluster_size: int):
    """The index of the cluster that was cancelled, or -1; the response may then be overwritten."""
    code = (
        "{ .reg .b128 q; .reg .pred p; .reg .b32 x; ld.shared.b128 q, [$1];"
        " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, q; mov.b32 x, -1;"
        " @p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 x, q;"
        f" @p div.u32 x, x, {cluster_size}; mov.b32 $0, x; fence.proxy.async.shared::cta; }}"
    )
    return _asm(code, [Int32], [address], [Int32])[0]


# --- Tensor Memory --------------------------------------------------------------------------------


def tcgen05_alloc(where, columns: int, ctas: int) -> None:
    """Allocate ``columns``, by a warp, whose address is written to shared memory."""
    group = f"cta_group::{ctas}.sync.aligned"
    _words(
        f"tcgen05.alloc.{group}.shared::cta.b32 [$0], {columns};"
        f" tcgen05.relinquish_alloc_permit.{group};",
        where,
    )


def tcgen05_dealloc(address, columns: int, ctas: int) -> None:
    _words(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, {columns};", address)


def smem_descriptor(address, leading_bytes: int = 16):
    """The low word of the descriptor of a matrix in shared memory: rows of 128 bytes, and the next
    panel of them ``leading_bytes`` further where rows are longer."""
    return (Int32(address) >> 4) & 0x3FFF | leading_bytes >> 4 << 16


def tcgen05_cp_scales(to, source, ctas: int) -> None:
    """Copy 128 x 4 scales from shared memory, to each 32 lanes. ``source`` is a descriptor."""
    _words(
        f"{{ .reg .b64 s; mov.b64 s, {{$1, {_SCALES}}};"
        f" tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [$0], s; }}",
        to,
        source,
    )


def tcgen05_mma(
    acc, a, b, scales: list, accumulate, instruction: int, kind: str, ctas: int
) -> None:
    """Issue an MMA, which adds to ``acc``, or overwrites it unless ``accumulate``. ``a`` and ``b``
    are descriptors, ``scales`` addresses of both scales in Tensor Memory, ``instruction`` a
    descriptor."""
    _words(
        "{ .reg .pred p; .reg .b64 a, b; .reg .b32 i; setp.ne.b32 p, $5, 0;"
        f" mov.b64 a, {{$1, {_OPERAND}}}; mov.b64 b, {{$2, {_OPERAND}}}; mov.b32 i, {instruction};"
        f" tcgen05.mma.cta_group::{ctas}.kind::{kind} [$0], a, b, i, [$3], [$4], p; }}",
        acc,
        a,
        b,
        *scales,
        accumulate,
    )


def tcgen05_ld(address, columns: int, parts: int = 1, stride: int = 0) -> list:
    """Load fp32 of a thread's lane, and wait for them: ``columns`` of each of the ``parts``, which
    begin ``stride`` columns after each other."""
    code, count = "", columns * parts
    for first in range(0, count, 32):
        names = ", ".join(f"${i}" for i in range(first, first + 32))
        where = first // columns * stride + first % columns
        code += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{names}}}, [${count} + {where}]; "
    code += "tcgen05.wait::ld.sync.aligned;"
    return _asm(code, [Float32] * count, [address], [Int32])


def fence_before_thread_sync() -> None:
    """Order what the thread did in Tensor Memory before what others do after they synchronize."""
    _words("tcgen05.fence::before_thread_sync;")


def fence_after_thread_sync() -> None:
    """Order what others did in Tensor Memory, before they synchronized, before what follows."""
    _words("tcgen05.fence::after_thread_sync;")


# --- values ---------------------------------------------------------------------------------------


def mul(a, b):
    return _asm("mul.rn.f32 $0, $1, $2;", [Float32], [a, b], [Float32] * 2)[0]


def add(a, b):
    return _asm("add.rn.f32 $0, $1, $2;", [Float32], [a, b], [Float32] * 2)[0]


def cvt_rn_x2(low, high, kind: str):
    """Two fp32 values rounded to "bf16" or "f16", in a word."""
    return _asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", [Int32], [low, high], [Float32] * 2)[0]


def widen(word, kind: str) -> list:
    """The fp32 values of a word of two."""
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.KIND $0, l; cvt.f32.KIND $1, h; }"
    return _asm(code.replace("KIND", kind), [Float32] * 2, [word], [Int32])


def st_shared_v4(address, words: list) -> None:
    """Store 16 bytes to shared memory: four ``words``, or fp32 values."""
    kind = type(words[0])
    code = f"st.shared.v4.{'f32' if kind is Float32 else 'b32'} [$0], {{$1, $2, $3, $4}};"
    _asm(code, [], [address, *words], [Int32] + [kind] * 4)


def ld_global_v4(address, wanted) -> list:
    """Load 16 bytes of global memory; zeros, and nothing is read, unless ``wanted``."""
    code = "{ .reg .pred p; setp.ne.b32 p, $5, 0; " + " ".join(
        f"mov.b32 ${i}, 0;" for i in range(4)
    )
    code += " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    return _asm(code, [Int32] * 4, [address, wanted], [Int64, Int32])


def st_global_v4(address, words: list, wanted) -> None:
    """Store 16 bytes to global memory, of four ``words`` or fp32 values; nothing unless
    ``wanted``."""
    kind = type(words[0])
    code = f"st.global.v4.{'f32' if kind is Float32 else 'b32'} [$0], {{$1, $2, $3, $4}};"
    code = f"{{ .reg .pred p; setp.ne.b32 p, $5, 0; @p {code} }}"
    _asm(code, [], [address, *words, wanted], [Int64] + [kind] * 4 + [Int32])
