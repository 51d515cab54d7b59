"""A kernel around tcgen05 instructions: an image of Tensor Memory in, the image after them out."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import numpy as np
from asynchronous import ORDERS, outcome
from ptx_kernels import text

PARAMETERS = ".param .u64 tensor, .param .u64 data"


def source(body: str, columns: int, size: int, group: int = 1, again: str = "") -> str:
    """``body`` is issued by one thread, of CTA 0; %r30 is the first column, s the shared memory."""
    chunks = []
    words = ", ".join(f"%v{i}" for i in range(32))
    for start in range(0, columns, 32):
        loads = "".join(
            f"ld.global.v4.u32 {{%v{i}, %v{i + 1}, %v{i + 2}, %v{i + 3}}}, [%rd3+{4 * (start + i)}];\n"
            for i in range(0, 32, 4)
        )
        chunks.append(
            f"{loads}tcgen05.st.sync.aligned.32x32b.x32.b32 [%r31+{start}], {{{words}}};\n"
        )
    dumps = []
    for start in range(0, columns, 32):
        stores = "".join(
            f"st.global.v4.u32 [%rd4+{4 * (start + i)}], {{%v{i}, %v{i + 1}, %v{i + 2}, %v{i + 3}}};\n"
            for i in range(0, 32, 4)
        )
        dumps.append(
            f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{words}}}, [%r31+{start}];\n"
            f"tcgen05.wait::ld.sync.aligned;\n{stores}"
        )
    g = f"cta_group::{group}"
    commit = f"tcgen05.commit.{g}.mbarrier::arrive::one.shared::cluster"
    commit += ".b64 [bar+8];" if group == 1 else ".multicast::cluster.b64 [bar+8], %h1;"
    return text(
        f""".shared .align 1024 .b8 s[{size}]; .shared .align 8 .b64 bar[2]; .shared .b32 place;
    .reg .b32 %v<32>;
    setp.eq.u32 %p1, %t, 0; setp.lt.u32 %p2, %t, 32; mov.u32 %r29, %cluster_ctarank;
    setp.eq.u32 %p3, %r29, 0; and.pred %p3, %p3, %p1; mov.u16 %h1, 3;
    ld.param.u64 %rd1, [tensor]; ld.param.u64 %rd2, [data];
    @!%p2 bra A;
    tcgen05.alloc.{g}.sync.aligned.shared::cta.b32 [place], {columns};
    tcgen05.relinquish_alloc_permit.{g}.sync.aligned;
    A: @%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 mbarrier.init.shared.b64 [bar+8], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    @!%p1 bra B;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
    mad.wide.u32 %rd5, %r29, {size}, %rd2;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%rd5], {size}, [bar];
    B: mbarrier.try_wait.parity.shared.b64 %p4, [bar], 0; @!%p4 bra B;
    ld.shared.u32 %r30, [place];
    and.b32 %r31, %t, 96; shl.b32 %r31, %r31, 16; add.u32 %r31, %r31, %r30;
    mad.lo.u32 %r28, %r29, 128, %t; mad.wide.u32 %rd3, %r28, {4 * columns}, %rd1;
    mad.wide.u32 %rd4, %r28, {4 * columns}, %out;
    {"".join(chunks)}
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive; barrier.cluster.wait;
    tcgen05.fence::after_thread_sync;
    @!%p3 bra C;
    {body}
    {commit}
    C: mbarrier.try_wait.parity.shared.b64 %p4, [bar+8], 0; @!%p4 bra C;
    tcgen05.fence::after_thread_sync;
    {again}
    {"".join(dumps)}
    tcgen05.fence::before_thread_sync; barrier.cluster.arrive; barrier.cluster.wait;
    @%p2 tcgen05.dealloc.{g}.sync.aligned.b32 %r30, {columns};""",
        PARAMETERS,
        target="sm_100a",
    )


def run(
    body: str, tensor: np.ndarray, data: np.ndarray, group: int = 1, again: str = ""
) -> np.ndarray:
    """(group, 128, columns) after ``body``; tensor: before; data: (group, bytes) of shared memory."""
    code = source(body, tensor.shape[2], data.shape[1], group, again)
    return outcome(
        code, [np.zeros_like(tensor), tensor, data], target="sm_100a", block=128, grid=group,
        cluster=group, orders=ORDERS[:3],
    )[0]  # fmt: skip
