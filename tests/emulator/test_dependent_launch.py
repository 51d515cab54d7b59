"""Programmatic launches: global memory is for what comes after the kernel before.

Each access passes once griddepcontrol.wait lies before it, and is refused without; only the word
that is reached, the thread and the line are those of the access.
"""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from asynchronous import ORDERS, aligned
from ptx_kernels import line_of, text

from blockscale import emulator as em

FEW = (*ORDERS[:2], ORDERS[-1])
WAIT = "griddepcontrol.wait;"
TOLD = "mbarrier::complete_tx::bytes"
REMEDY = "nothing orders it after the kernel before, which may still run when a programmatic launch starts: griddepcontrol.wait first"
PARAMETERS = ".param .u64 in, .param .align 64 .b8 tm[128]"
#: s: 1024 bytes of shared memory, words of the threads at %r2; %rd2: the thread's word of in.
HEAD = """.shared .align 128 .b8 s[1024]; .shared .align 8 .b64 bar;
    setp.eq.u32 %p1, %t, 0; setp.lt.u32 %p2, %t, 32; mov.u32 %r1, s; mad.lo.u32 %r2, %t, 4, %r1;
    ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, 4, %rd1; mov.b64 %rd3, tm;
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    st.shared.u32 [%r2], %t; fence.proxy.async.shared::cta; bar.sync 0;
"""
LANDED = "W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;"


def launched(body: str, order: tuple[str, int] = ORDERS[0], target: str = "sm_90a", check: Any = "all",
             block: int = 64, programmatic: bool = True, **more: Any) -> np.ndarray:  # fmt: skip
    """What the kernel leaves at out. in: 1000, 1001, ...; tm: a map of it, boxes of 8 x 4 words."""
    out, given = aligned(np.zeros(256, np.uint32)), aligned(1000 + np.arange(256, dtype=np.uint32))
    tensor = em.TensorMap.of(given.reshape(8, 32), (4, 8))
    device = em.Device(target, completion=order[0], seed=order[1], check=check)
    device.launch(text(HEAD + body, PARAMETERS, target=target), "k", 1, block, [out, given, tensor],
                  programmatic=programmatic, **more)  # fmt: skip
    return out


def refused(body: str, *, line: str = "// A", target: str = "sm_90a", **more: Any) -> str:
    """What the launch is refused with, at the line with ``line``."""
    with pytest.raises(em.EarlyAccess, match=r"griddepcontrol\.wait first") as caught:
        launched(body, target=target, **more)
    assert caught.value.line == line_of(text(HEAD + body, PARAMETERS, target=target), line)
    assert isinstance(caught.value, em.DataRace)
    return str(caught.value)


@dataclass(frozen=True)
class Access:
    """An access to global memory, in a line that ends in ``// A``.

    ``says``: of thread, verb and place. ``more``: what the kernel does then, so that it is right.
    """

    body: str
    says: str
    more: str = ""
    target: str = "sm_90a"


BULK = """@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    @%p1 """
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
ACCESSES = {
    "ld": Access("ld.global.u32 %r5, [%rd2]; // A", "thread 0 of CTA (0, 0, 0), line {A} reads byte 0x0 of args[1]"),
    "ld of four words": Access("ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd1+64]; // A", "reads byte 0x40 of args[1]"),
    "generic ld": Access("ld.u32 %r5, [%rd2+4]; // A", "reads byte 0x4 of args[1]"),
    "ld of some threads": Access("@!%p2 ld.volatile.global.u32 %r5, [%rd2]; // A",
                                 "thread 32 of CTA (0, 0, 0), line {A} reads byte 0x80 of args[1]"),
    "ld of one lane": Access("setp.eq.u32 %p4, %t, 37; @%p4 ld.u32 %r5, [%rd2]; // A",
                             "thread 37 of CTA (0, 0, 0), line {A} reads byte 0x94 of args[1]"),
    "st": Access("st.global.u32 [%at+8], %t; // A", "thread 0 of CTA (0, 0, 0), line {A} writes byte 0x8 of args[0]"),
    "atom": Access("atom.global.add.u32 %r5, [%out], 1; // A", "thread 0 of CTA (0, 0, 0), line {A} reads byte 0x0 of args[0]"),
    "red": Access("red.global.add.u32 [%at], 1; // A", "thread 0 of CTA (0, 0, 0), line {A} reads byte 0x0 of args[0]"),
    "cp.async": Access("cp.async.ca.shared.global [%r2], [%rd2+4], 4; // A", "thread 0 of CTA (0, 0, 0), line {A} reads byte 0x4 of args[1]", "cp.async.wait_all;"),
    "bulk load": Access(f"{BULK}cp.async.bulk.shared::cluster.global.{TOLD} [s], [%rd1], 128, [bar]; // A",
                        "thread 0 of CTA (0, 0, 0), line {A} reads byte 0x0 of args[1]", LANDED),
    "bulk store": Access("setp.eq.u32 %p4, %t, 32; @%p4 cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 128; // A",
                         "thread 32 of CTA (0, 0, 0), line {A} writes byte 0x0 of args[0]", DONE),
    "TMA load": Access(f"{BULK}cp.async.bulk.tensor.2d.shared::cluster.global.tile.{TOLD} [s], [%rd3, {{4, 0}}], [bar]; // A",
                       "thread 0 of CTA (0, 0, 0), line {A} reads byte 0x10 of args", LANDED),
    "TMA store": Access("@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd3, {0, 0}], [s]; // A",
                        "thread 0 of CTA (0, 0, 0), line {A} writes byte 0x0 of args", DONE),
    "TMA reduction": Access("@%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd3, {0, 0}], [s]; // A",
                            "thread 0 of CTA (0, 0, 0), line {A} writes byte 0x0 of args", DONE),
    "st.async": Access("@%p1 st.async.weak.global.u32 [%at], %t; // A", "thread 0 of CTA (0, 0, 0), line {A} writes byte 0x0 of args[0]", target="sm_100a"),
}  # fmt: skip


@pytest.mark.parametrize("order", FEW, ids=str)
@pytest.mark.parametrize("name", ACCESSES)
def test_accesses_come_after_the_wait(name: str, order: tuple[str, int]) -> None:
    access = ACCESSES[name]
    end = f"\n{access.more} griddepcontrol.launch_dependents; {WAIT}"
    line = line_of(text(HEAD + access.body, PARAMETERS), "// A")
    said = refused(access.body + end, target=access.target, order=order)
    assert access.says.replace("{A}", str(line)) in said
    assert REMEDY in said
    launched(WAIT + access.body + end, order, access.target)
    launched(access.body + end, order, access.target, programmatic=False)
    launched(access.body + end, order, access.target, check="uninitialized")


@pytest.mark.parametrize("before", ["", WAIT], ids=["early", "late"])
def test_what_may_have_changed_since_the_start_is_no_constant(before: str) -> None:
    """ld.global.nc wants memory that nothing writes as long as the kernel is there."""
    body = before + "\n@!%p2 ld.global.nc.v4.u32 {%r5, %r6, %r7, %r8}, [%rd1+64]; // A\n" + WAIT
    with pytest.raises(em.EarlyAccess, match=r"load without \.nc") as caught:
        launched(body)
    line = line_of(text(HEAD + body, PARAMETERS), "// A")
    assert caught.value.line == line
    assert f"thread 32 of CTA (0, 0, 0), line {line} reads byte 0x40 of args[1]" in str(
        caught.value
    )
    launched(body, programmatic=False)
    launched(body, check="uninitialized")


def test_never_waiting_is_told_the_same() -> None:
    assert "writes byte 0x0 of args[0]" in refused("st.global.u32 [%at], 1; // A")
    refused("griddepcontrol.launch_dependents;\nst.global.u32 [%at], 1; // A")


def test_what_is_no_global_memory_may_come_early() -> None:
    """Parameters, constants, maps among the parameters, shared and local memory, prefetches."""
    body = f""".local .align 4 .b32 mine; st.local.u32 [mine], %t; ld.shared.u32 %r5, [%r2];
    mov.b64 %rd4, tm; cvta.param.u64 %rd4, %rd4; ld.u32 %r6, [%rd4];
    cvta.const.u64 %rd5, table; ld.u32 %r7, [%rd5+4]; ld.const.u32 %r8, [table];
    prefetch.tensormap [%rd4]; prefetch.global.L2 [%rd1]; cp.async.bulk.prefetch.L2.global [%rd1], 64;
    @%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd4, {{0, 0}}];
    {WAIT} ld.local.u32 %r9, [mine]; add.u32 %r7, %r7, %r8; add.u32 %r9, %r9, %r7; st.global.u32 [%at], %r9;
    """
    source = text(HEAD + body, PARAMETERS, ".const .align 4 .u32 table[2] = {7, 8};\n")
    out, given = aligned(np.zeros(64, np.uint32)), aligned(np.zeros((8, 32), np.uint32))
    args = [out, given, em.TensorMap.of(given, (4, 8))]
    em.Device().launch(source, "k", 1, 64, args, programmatic=True)
    assert (out == 15 + np.arange(64)).all()


@pytest.mark.parametrize("use", [
    f"@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.{TOLD} [s], [%rd1, {{0, 0}}], [bar]; // A",
    "@%p1 prefetch.tensormap [%rd1]; // A",
])  # fmt: skip
def test_a_tensor_map_in_global_memory_is_read(use: str) -> None:
    assert "thread 0 of CTA (0, 0, 0)" in (said := refused(use))
    assert "reads byte 0x0 of args[1]" in said


def test_variables_of_the_module_are_global_memory() -> None:
    source = text("ld.global.u32 %r1, [v+4];", before=".global .align 4 .u32 v[2] = {7, 8};\n")
    with pytest.raises(em.EarlyAccess, match="reads byte 0x4 of v;"):
        em.Device().launch(source, "k", 1, 32, [np.zeros(1)], programmatic=True)


#: Ways from the wait of one warp to a store of another, and what they lack.
SYNCED = [
    (f"@%p2 {WAIT} <>", "bar.sync 0;", "bar.warp.sync -1;"),
    (f"@%p1 {WAIT} bar.warp.sync -1; @%p1 <> V: mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra V;",
     "mbarrier.arrive.shared.b64 _, [bar];", "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];"),
    (f"@%p1 {WAIT} bar.warp.sync -1; <>", "barrier.cluster.arrive; barrier.cluster.wait;",
     "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "right", "wrong"), SYNCED)
def test_the_wait_of_another_warp_counts_if_it_comes_before(
    way: str, right: str, wrong: str
) -> None:
    store = "st.global.u32 [%at], 1; // A"
    out = launched(way.replace("<>", right) + store)
    assert (out[:64] == 1).all()
    said = refused(way.replace("<>", wrong) + store)
    assert "thread 32 of CTA (0, 0, 0)" in said
    assert "writes byte 0x80 of args[0]" in said


@pytest.mark.parametrize("order", FEW, ids=str)
def test_who_gets_data_of_a_copy_comes_after_its_wait(order: tuple[str, int]) -> None:
    """One thread waits and loads by TMA; everybody waits for the load, and stores."""
    copy = ACCESSES["TMA load"].body
    body = f"@%p1 {WAIT} {copy}\n {LANDED} ld.shared.u32 %r5, [%r2]; st.global.u32 [%at], %r5;"
    out = launched(body, order, block=32)
    assert (out[:32] == [1004 + 32 * (i // 4) + i % 4 for i in range(32)]).all()
    assert (launched(body, order)[:32] == out[:32]).all()


def test_a_copy_knows_what_its_issuer_knew() -> None:
    """The wait comes after the issue, and before the copy completes."""
    refused(ACCESSES["TMA load"].body + f"\n{WAIT}{LANDED}", order=("late", 0))


def test_the_other_cta_of_a_cluster() -> None:
    """Rank 0 waits; rank 1 stores once the barrier of the cluster says so."""
    body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p4, %r5, 0; @%p4 {WAIT}
    <> @!%p4 st.global.u32 [%at], 1; // A"""
    source = text(body)
    for barrier, right in (("barrier.cluster.arrive; barrier.cluster.wait;", True), ("", False)):
        out = np.zeros(32, np.uint32)
        kernel = source.replace("<>", barrier)
        device = em.Device()
        if right:
            device.launch(kernel, "k", 2, 32, [out], cluster=2, programmatic=True)
            assert out.all()
            continue
        with pytest.raises(em.EarlyAccess, match=r"thread 0 of CTA \(1, 0, 0\)"):
            device.launch(kernel, "k", 2, 32, [out], cluster=2, programmatic=True)


def test_each_cta_waits_for_itself() -> None:
    """The first CTA waits, the second does not; also when another process runs it."""
    body = f"mov.u32 %r5, %ctaid.x; setp.eq.u32 %p4, %r5, 0; @%p4 {WAIT} st.global.u32 [%at], 1;"
    for workers in (1, 2):
        with pytest.raises(em.EarlyAccess, match=r"of CTA \(1, 0, 0\)"):
            em.Device(workers=workers).launch(
                text(body), "k", 2, 32, [np.zeros(32, np.uint32)], programmatic=True
            )


# --- CuTe DSL -------------------------------------------------------------------------------------

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
torch = pytest.importorskip("torch")

import cuda.bindings.driver as cuda  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402


@cute.kernel
def double_kernel(a: cute.Tensor, waits: cutlass.Constexpr):
    if cutlass.const_expr(waits):
        cute.arch.griddepcontrol_wait()
    i = cute.arch.thread_idx()[0]
    a[i] = 2 * a[i]
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def double(a: cute.Tensor, stream: cuda.CUstream, waits: cutlass.Constexpr, pdl: cutlass.Constexpr):
    double_kernel(a, waits).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=pdl)


@pytest.mark.parametrize(("waits", "pdl"), [(True, True), (False, True), (False, False)])
def test_kernels_of_cute_dsl(waits: bool, pdl: bool) -> None:
    a, stream = torch.arange(32, dtype=torch.float32), cuda.CUstream(0)
    with em.cutedsl(em.Device("sm_90a")):
        compiled = cute.compile(double, from_dlpack(a), stream, waits, pdl)
        if pdl and not waits:
            with pytest.raises(em.EarlyAccess, match=r"reads byte 0x0 of .*args\[0\]"):
                compiled(from_dlpack(a), stream)
            return
        compiled(from_dlpack(a), stream)
    assert (a == 2 * torch.arange(32)).all()
