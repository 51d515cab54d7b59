"""Why each mutant of ``mutate.py`` survives: kernel, rule and lines of the respelled PTX.

"equivalent": the mutant is as right as the kernel, by the PTX ISA (9.1) or because of what runs
before and after; "missed": it is wrong, and the emulator does not notice.
"""

from __future__ import annotations

__all__ = ["REASONS"]

_DEEPGEMM, _TRITON = "fp8_fp4_2cta", "tma_persistent_ws_fp16_sm100"
_EQUIVALENT = [
    (
        _DEEPGEMM, "delete fence.proxy.async", (364, 635, 905),
        "after the scales of A are transposed; each thread goes on to those of B, and the fence "
        "after these comes before its arrival, too: it is for all that the thread accessed before",
    ),
    (
        _DEEPGEMM, "delete tcgen05.fence", (1589,),
        "after the wait for an accumulator; the thread then waits for the operands, and the "
        "tcgen05.fence::after_thread_sync after that wait comes before its first tcgen05.cp or "
        ".mma, too",
    ),
    (
        _DEEPGEMM, "delete bar.warp.sync", (1733,),
        "after a commit; only the elected lane acts, which elect.sync says is the same every time "
        "(9.7.13.14), and each lane waits for the next operands itself",
    ),
    (
        _DEEPGEMM, "delete barrier.cluster", (58,),
        "the first of the kernel, before tcgen05.alloc.cta_group::2, for which the warps of both "
        "CTAs wait anyway (Table 46: they perform it collectively). It is relaxed and orders no "
        "memory, and until the next barrier of the cluster nobody touches memory of the other CTA",
    ),
    (
        _DEEPGEMM, "source of tcgen05.cp: base offset", (1644, 1784, 1931),
        "the base offset says where the pattern of a swizzle begins (9.7.16.4), and the scales lie "
        "without a swizzle",
    ),
    (
        _DEEPGEMM, "tcgen05.ld 32 lanes further", (2334, 2519, 2747),
        "which lanes a warp reads follows from its number in the warpgroup (9.7.16.8.1); the "
        "kernel itself names lane 0 in all four warps, and runs without tmem_lanes for that",
    ),
    (
        _DEEPGEMM, "tcgen05.mma always accumulates", (1824, 1971),
        "of later blocks of K of a tile, where the predicate is constant and true",
    ),
    (
        _TRITON, "delete bar.sync", (579,),
        "between two mbarrier.init of one thread; the barriers after the last of them order all "
        "for the other warps",
    ),
    (
        _TRITON, "delete bar.sync", (1285,),
        "before the arrival that gives back an accumulator after the last tile; nobody waits for "
        "that phase, and barrier.sync 1, which all warps pass next, comes before mbarrier.inval "
        "and tcgen05.dealloc",
    ),
    (
        _TRITON, "delete bar.warp.sync", (264,),
        "before each lane waits for the operands itself; nothing that one lane wrote is read by "
        "another, and elect.sync elects the same lane every time (9.7.13.14)",
    ),
    (
        _TRITON, "delete bar.warp.sync", (494,),
        "before lane 0 arrives for the warp that multiplies, after the last tile; who waits for "
        "that comes to barrier.sync 1 with every lane of this warp, before it touches anything "
        "that they use",
    ),
    (
        _TRITON, "delete mbarrier.inval", (1294, 1305, 1317),
        "an mbarrier must be invalidated before its memory is used for another purpose "
        "(9.7.13.15.10), and nothing uses it again before the CTA exits",
    ),
    (
        _TRITON, "tcgen05.mma always accumulates", (299, 304),
        "of later steps of a block of K, where the predicate is constant and true",
    ),
]  # fmt: skip
REASONS: dict[tuple[str, str], tuple[str, str]] = {
    (kernel, f"{rule} at {line}"): ("equivalent", why)
    for kernel, rule, lines, why in _EQUIVALENT
    for line in lines
}
