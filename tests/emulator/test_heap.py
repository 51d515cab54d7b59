"""malloc and free in a kernel, as nvcc calls them."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import run, text

from blockscale import emulator as em

EXTERN = """.extern .func (.param .b64 func_retval0) malloc (.param .b64 malloc_param_0);
.extern .func free (.param .b64 free_param_0);
"""


def malloc(size: object, into: str = "%rd1") -> str:
    return (
        f"{{ .param .b64 size; .param .b64 back; st.param.b64 [size], {size}; "
        f"call.uni (back), malloc, (size); ld.param.b64 {into}, [back]; }}\n"
    )


def free(address: str = "%rd1") -> str:
    return f"{{ .param .b64 at; st.param.b64 [at], {address}; call.uni free, (at); }}\n"


@pytest.mark.parametrize("check", ["all", "all,global", "none"])
def test_each_thread_has_a_block_of_its_own(check: str) -> None:
    """It is aligned to 16 bytes, and holds no zeros before it is written."""
    body = (
        malloc(20)
        + """ld.u32 %r1, [%rd1+16]; and.b64 %rd2, %rd1, 15; cvt.u32.u64 %r2, %rd2;
        mov.u32 %r3, %ctaid.x; mad.lo.u32 %r3, %r3, 64, %t; st.u32 [%rd1+16], %r3;
        ld.global.u32 %r4, [%rd1+16]; setp.eq.u32 %p1, %r1, -1; selp.u32 %r5, %r4, 0, %p1;
        add.u32 %r5, %r5, %r2; mad.wide.u32 %rd3, %r3, 4, %out; st.global.u32 [%rd3], %r5;"""
        + free()
    )
    out = np.zeros(128, np.uint32)
    source = text(body, before=EXTERN)
    em.Device("sm_90a", check=check).launch(source, "k", 2, 64, [out])
    assert out.tolist() == list(range(128))


def faulty(body: str, message: str) -> None:
    with pytest.raises(em.MemoryFault, match=message):
        run(body, np.zeros(32, np.uint32), block=1, before=EXTERN)


MADE = r"the block of 20 bytes at 0x[0-9a-f]+ that thread \(0, 0, 0\) of CTA \(0, 0, 0\) allocated"


@pytest.mark.parametrize("access", ["ld.u32 %r1, [%rd1{}];", "st.global.u32 [%rd1{}], 1;",
                                    "atom.global.add.u32 %r1, [%rd1{}], 1;"])  # fmt: skip
def test_what_is_no_block_is_out_of_bounds(access: str) -> None:
    faulty(malloc(20) + access.format("+20"), f"is out of {MADE}")
    faulty(malloc(20) + access.format("+100"), "is in no block of malloc")
    faulty(malloc(20) + access.format("-4"), "is in no block of malloc")
    faulty(malloc(20) + free() + access.format(""), f"is in {MADE}, which thread .* has freed")
    faulty(malloc(20) + free() + malloc(20, "%rd2") + access.format(""), "has freed")


def test_what_is_freed_wrongly() -> None:
    faulty(malloc(20) + free() + free(), f"free: {MADE} was freed by thread .* already")
    faulty(malloc(20) + "add.u64 %rd1, %rd1, 4;" + free(), "free: no block of malloc begins at 0x")
    faulty(free("%out"), "free: no block of malloc begins at 0x")


def test_there_are_eight_megabytes() -> None:
    """malloc gives a null pointer then, which may be freed; what was freed makes room."""
    out = np.zeros(32, np.uint32)
    body = malloc(8 << 20) + malloc(1, "%rd2") + free() + free("%rd2") + malloc(1, "%rd3")
    body += "setp.eq.u64 %p1, %rd2, 0; setp.ne.and.u64 %p1, %rd3, 0, %p1; selp.u32 %r1, 1, 0, %p1;"
    run(body + "st.global.u32 [%at], %r1;", out, block=1, before=EXTERN)
    assert out[0] == 1
    many = "mov.u32 %r1, 0; again: " + malloc(1 << 20) + free()
    many += "add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 70; @%p1 bra again;"
    with pytest.raises(em.PtxError, match="malloc: 64 MiB have been allocated in all"):
        run(many, out, block=1, before=EXTERN)


def test_processes_have_no_heap_in_common() -> None:
    with pytest.raises(em.PtxError, match="give workers=1"):
        em.Device("sm_90a", workers=2).launch(
            text(malloc(4), before=EXTERN), "k", 4, 32, [np.zeros(32, np.uint32)]
        )


# --- races ----------------------------------------------------------------------------------------

#: One thread allocates, another one accesses the block; the first one frees it much later.
SHARED = (
    ".shared .u64 block; .shared .align 16 .b8 data[16]; setp.ne.u32 %p1, %t, 0; @%p1 bra MADE;"
    + malloc(64)
    + """st.shared.u64 [block], %rd1;
    MADE: bar.sync 0; ld.shared.u64 %rd1, [block]; setp.eq.u32 %p2, %t, 32; @!%p2 bra USED;
    ACCESS
    USED: BETWEEN @%p1 bra END;
    mov.u32 %r1, 0; wait: add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 3000; @%p3 bra wait;
"""
    + free()
    + "END:"
)
BULK = """mov.u32 %r3, data; st.shared.v4.u32 [%r3], {1, 2, 3, 4}; fence.proxy.async;
    cvta.to.global.u64 %rd2, %rd1; cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3], 16;
    cp.async.bulk.commit_group; WAIT"""


def shares(access: str, between: str) -> None:
    for completion in ("eager", "late"):
        device = em.Device("sm_90a", check="all,global", completion=completion)
        body = SHARED.replace("ACCESS", access).replace("BETWEEN", between)
        source = text(body, before=EXTERN)
        device.launch(source, "k", 1, 64, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize("access", ["ld.u32 %r2, [%rd1+60];", "st.global.u32 [%rd1+60], 1;",
                                    "atom.add.u32 %r2, [%rd1+60], 1;"])  # fmt: skip
def test_a_block_is_freed_after_its_last_use(access: str) -> None:
    """Whoever happens to come first."""
    shares(access, "bar.sync 0;")
    with pytest.raises(em.DataRace, match="frees byte 0x7c of the heap; nothing orders it after"):
        shares(access, "")


def test_a_block_is_freed_after_the_copies_into_it() -> None:
    shares(BULK.replace("WAIT", "cp.async.bulk.wait_group 0;"), "bar.sync 0;")
    with pytest.raises(em.DataRace, match=r"frees byte 0x40 .*must wait for it by cp.async.bulk"):
        shares(BULK.replace("WAIT", "cp.async.bulk.wait_group.read 0;"), "bar.sync 0;")


def test_the_kernel_before_does_not_use_the_heap_of_this_one() -> None:
    """Such a launch may allocate before it waits."""
    out = np.zeros(32, np.uint32)
    body = malloc(4) + "st.u32 [%rd1], 7; griddepcontrol.wait; ld.u32 %r1, [%rd1];"
    run(body + "st.global.u32 [%at], %r1;", out, before=EXTERN, programmatic=True)
    assert (out == 7).all()


def test_what_is_freed_twice_may_be_collected() -> None:
    out = np.zeros(32, np.uint32)
    source = text(malloc(20) + free() + free() + "st.global.u32 [%at], 1;", before=EXTERN)
    report = em.Device("sm_90a", on_error="collect").launch(source, "k", 1, 32, [out])
    assert [(alarm.kind, alarm.count) for alarm in report.alarms] == [("bounds", 32)]
    assert (out == 1).all()
