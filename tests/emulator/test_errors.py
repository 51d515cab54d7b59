"""What the emulator says when something is wrong: with the PTX line, and what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from ptx_kernels import HEAD, fault, line_of, run, text

from blockscale import emulator as em

OUT = np.zeros(64, np.uint32)


# --- deadlocks ------------------------------------------------------------------------------------


def test_missing_lanes_at_a_shuffle() -> None:
    body = """setp.ge.u32 %p1, %t, 48; @%p1 bra hang;
    shfl.sync.idx.b32 %r1, %t, 0, 31, -1;
    bra end;
    hang: bar.sync 0;
    end:"""
    with pytest.raises(em.Deadlock) as caught:
        run(body, OUT, block=64)
    message, source = str(caught.value), text(body)
    shuffle, barrier = line_of(source, "shfl"), line_of(source, "bar.sync")
    assert (
        f"CTA (0, 0, 0), warp 1 lane 0-15, line {shuffle}: shfl.sync.idx.b32 waits for "
        "lanes 0xffff0000 of its mask 0xffffffff"
    ) in message
    assert (
        f"warp 1 lane 16-31, line {barrier}: bar.sync waits for barrier 0: 0 of 2 warps" in message
    )


def test_a_lane_that_has_exited_does_not_hide_a_deadlock() -> None:
    body = """setp.eq.u32 %p1, %t, 31; @%p1 exit; setp.lt.u32 %p2, %t, 16; @%p2 bra low;
        bar.warp.sync 0x7fff0000; bar.sync 1, 64; low: bar.warp.sync 0x7fffffff;"""
    with pytest.raises(em.Deadlock, match="lanes 0x7fff0000 of its mask 0x7fffffff"):
        run(body, OUT)


def test_barrier_short_of_threads() -> None:
    with pytest.raises(
        em.Deadlock, match=r"warp 0-1, line \d+: bar.sync waits for barrier 3: 64 of 96"
    ):
        run("bar.sync 3, 96;", OUT, block=64)


def test_cluster_barrier_without_the_other_cta() -> None:
    body = """mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; barrier.cluster.arrive;
        @%p1 bra other; barrier.cluster.wait; bra end; other: bar.sync 1, 64; end:"""
    with pytest.raises(em.Deadlock) as caught:
        run(body, OUT, grid=2, cluster=2)
    assert "CTA (1, 0, 0), warp 0" in str(caught.value)
    body = """mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 bra end;
        barrier.cluster.arrive; barrier.cluster.wait;
        bra end; end: bar.sync 1, 64;"""
    with pytest.raises(em.Deadlock, match="the barrier of its cluster: 32 of 64 threads are there"):
        run(body, OUT, grid=2, cluster=2)


# --- memory ---------------------------------------------------------------------------------------

FAULTS = [
    ("ld.global.u32 %r1, [%at+0x10000000];", "that is no argument is named in buffers="),
    ("st.global.u32 [%out+254], %r1;", "is not a multiple of 4"),
    ("st.global.b64 [%out+252], %rd1;", "is not a multiple of 8"),
    ("st.global.b32 [%out+256], 1;", r"\(\+4\) is out of bounds"),
    ("ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%out+4];", "is not a multiple of 16"),
    (".shared .b32 s[4]; st.shared.u32 [s+16], 1;", "16 bytes from 0x400, none of them dynamic"),
    (".shared .b32 s[4]; st.shared.u32 [s-4], 1;", "out of bounds"),
    ("mov.u32 %r1, 0x3000400; ld.shared.u32 %r2, [%r1];", "names CTA 3 of 1"),
    (".local .b32 x; ld.local.u32 %r1, [x+4];", "it has 4 bytes"),
    ("ld.global.u32 %r1, [%rd7];", r"global address 0xa5a5a5a5a5a5a5a5|not a multiple"),
    ("mov.u64 %rd1, 0; ld.u32 %r1, [%rd1];", "is out of bounds: a null pointer"),
    ("trap;", "executed trap"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), FAULTS)
def test_faults_name_the_line(body: str, message: str) -> None:
    error = fault(body, OUT, em.PtxError, message)
    assert f"(line {error.line})" in str(error)


@pytest.mark.parametrize("wrong", ["tex.2d.v4.f32.f32 %r1, %r2;", "add.u32.xyz %r1, %r1, %r1;"])
def test_the_source_line_of_what_is_refused(wrong: str) -> None:
    with pytest.raises(em.PtxError, match=r", kernel\.cu:77 \(line \d+\)$"):
        run(f"\n.loc 1 77 3\n{wrong}", OUT, before='.file 1 "kernel.cu"\n\n')


def test_source_lines() -> None:
    with pytest.raises(em.PtxError, match=r"line 14, kernel.cu:77: trap"):
        run("\n.loc 1 77 3\ntrap;", OUT, before='.file 1 "kernel.cu"\n\n')


def test_source_lines_of_what_is_inlined() -> None:
    """A wrapper of a library, called by a function in the kernel's file, called by the kernel."""
    files = '.file 1 "kernel.cu"\n.file 2 "wrappers.h"\n'
    body = """
    .loc 1 77 3
    .loc 1 12 5, function_name $L__info_string0, inlined_at 1 77 3
    .loc 2 8 1, function_name $L__info_string1, inlined_at 1 12 5
    .loc 2 5 9, function_name $L__info_string2, inlined_at 2 8 1
    trap;"""
    with pytest.raises(
        em.PtxError, match=r", wrappers\.h:5, inlined at kernel\.cu:12, kernel\.cu:77: trap"
    ):
        run(body, OUT, before=files)


def test_a_source_line_is_inlined_where_the_last_location_before_it_says() -> None:
    body = """
    .loc 1 77 3
    .loc 1 12 5, function_name $L__info_string0, inlined_at 1 77 3
    .loc 1 90 3
    .loc 1 12 5, function_name $L__info_string0, inlined_at 1 90 3
    .loc 1 3 1, function_name $L__info_string1, inlined_at 1 12 5
    trap;"""
    with pytest.raises(em.PtxError, match=r"kernel\.cu:3, inlined at .*:12, .*:90: trap"):
        run(body, OUT, before='.file 1 "kernel.cu"\n')


def test_store_to_a_read_only_array() -> None:
    out = np.zeros(32, np.uint32)
    out.flags.writeable = False
    with pytest.raises(em.PtxError, match=r"store to args\[0\], which is read-only"):
        run("st.global.u32 [%at], 1;", out)


# --- instructions ---------------------------------------------------------------------------------

UNSUPPORTED = [
    ("frobnicate.u32 %r1, %r2;", "unsupported instruction frobnicate.u32"),
    ("add.wrong.u32 %r1, %r2, %r3;", "unsupported modifier .wrong"),
    ("add.u32 %r1, %r2, %r3, %r4;", "has 4 operands, 3 are expected"),
    ("add.u32 %r1, %r2;", "has 2 operands, too few"),
    ("add.u32.u32 %r1, %r2, %r3;", "expected one type, found u32, u32"),
    ("add.b32 %r1, %r2, %r3;", "type .b32 is not supported"),
    ("and.f32 %r1, %r2, %r3;", "type .f32 is not supported"),
    ("add.u64 %r1, %rd2, %rd3;", "register %r1 of type .b32 written as .u64"),
    ("add.u64 %rd1, %r2, %rd3;", "register %r2 of type .b32 read as .u64"),
    ("add.u32 %tid, %r2, %r3;", "the destination is no register"),
    ("mul.u32 %r1, %r2, %r3;", "integer products take"),
    ("mov.u32 %r1, %envreg3;", "special register %envreg3 is not supported"),
    ("ld.global.u32 %r1, %rd1;", "expected an address"),
    ("ld.global.v2.u32 {%r1,%r2,%r3}, [%at];", "loads 2 values into 3 registers"),
    ("ld.shared.u32 %r1, [nothing];", "symbol 'nothing' is not defined"),
    ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", "must be a number"),
    ("fence.of.cows;", "there is no such fence"),
    ("mov.of.cows.u32 %r1, %r2;", "unsupported modifier .of, .cows"),
    ("call.uni nowhere, (%r1);", "function 'nowhere' is not in the module"),
    ("call.uni __cudaCDP2LaunchDeviceV2_ptsz, (%r1);", "launches kernels"),
    ("mov.u32 %r1, {%h1};", "register %h1 of type .b16 read as .b32"),
    ("cvt.u32.f32 %r1, %f1;", "needs .rni"),
    ("cvt.rna.f16.f32 %h1, %f1;", "unsupported modifier .rna"),
    ("cvt.rn.e4m3x2.f32 %h1, %f1, %f2;", "expected .rn.satfinite"),
    ("atom.shared.add.v2.f32 {%f1,%f2}, [%at], {%f1,%f2};", "vectors must be in global memory"),
    ("atom.global.max.f32 %f1, [%at], %f2;", "type .f32 is not supported"),
    ("add.rz.f16 %h1, %h2, %h3;", "unsupported modifier"),
    ("setp.lt.u32 %r1, %r2, %r3;", "register %r1 of type .b32 written as .pred"),
    ("bar.sync 1, 33;", "no multiple of 32"),
    ("bar.sync 16;", "barrier 16: there are 16"),
    ("barrier.cluster.wait;", "without having arrived"),
    ("shfl.sync.idx.b32 %r1, %r2, 0, 31, 1;", "not in its mask"),
]


@pytest.mark.parametrize(("body", "message"), UNSUPPORTED)
def test_unsupported(body: str, message: str) -> None:
    with pytest.raises(
        em.PtxError, match=re.escape(message) if "|" not in message else message
    ) as caught:
        run(body, OUT)
    assert caught.value.line == line_of(text(body), body)


# --- launches -------------------------------------------------------------------------------------

SCALARS = ".param .u64 p, .param .u32 n, .param .f32 f, .param .b8 raw[6], .param .u16 small"
GOOD = (OUT, 3, 1.5, b"123456", 65535)

ARGUMENTS = [
    ((), ValueError, "args: got 1, k takes 6"),
    ((*GOOD, 1), ValueError, "args: got 7, k takes 6"),
    ((OUT[::2], *GOOD[1:]), ValueError, r"args\[1\]: is not contiguous"),
    ((torch.zeros(4, 4).T, *GOOD[1:]), ValueError, r"args\[1\]: is not contiguous"),
    ((torch.zeros(4, device="meta"), *GOOD[1:]), ValueError, r"args\[1\]: is on meta"),
    ((np.array([None]), *GOOD[1:]), TypeError, r"args\[1\]: an array of Python objects"),
    (("text", *GOOD[1:]), TypeError, r"args\[1\]: got str"),
    ((OUT, OUT, *GOOD[2:]), ValueError, r"args\[2\]: got an array; n has 4 bytes"),
    ((OUT, 1 << 32, *GOOD[2:]), ValueError, r"args\[2\]: 4294967296 does not fit n, of type .u32"),
    ((OUT, 2.5, *GOOD[2:]), TypeError, r"args\[2\]: got a float; n is of type .u32"),
    ((OUT, np.int64(3), *GOOD[2:]), ValueError, r"args\[2\]: got int64; n has 4 bytes"),
    ((OUT, 3, 1.5, b"12345", 1), ValueError, r"args\[4\]: got 5 bytes; raw has 6 bytes"),
    ((OUT, 3, 1.5, 7, 1), ValueError, r"args\[4\]: got a number; raw has 6 bytes"),
]


@pytest.mark.parametrize(("args", "error", "message"), ARGUMENTS)
def test_arguments(args: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run("", OUT, *args, parameters=SCALARS)


def test_arguments_arrive() -> None:
    out = np.zeros(8, np.uint32)
    run(
        """ld.param.u32 %r1, [n]; ld.param.f32 %f1, [f]; ld.param.u8 %r2, [raw+5];
        ld.param.u16 %r3, [small]; ld.param.u64 %rd1, [p];
        st.global.v4.u32 [%out], {%r1, %r2, %r3, %f1}; ld.global.u32 %r4, [%rd1];
        st.global.u32 [%out+16], %r4;""",
        out, torch.tensor([77, 1], dtype=torch.int32), -1, 1, bytes(range(1, 7)), np.uint16(9),
        parameters=SCALARS, block=1,
    )  # fmt: skip
    assert out[:5].tolist() == [0xFFFFFFFF, 6, 9, 0x3F800000, 77]


LAUNCHES = [
    ({"block": 1025}, "block: 1025 threads; at most 1024"),
    ({"block": 0}, "block: got 0"),
    ({"grid": (1, 1, 1, 1)}, "grid: got"),
    ({"grid": 3, "cluster": 2}, "does not divide the grid"),
    ({"grid": 32, "cluster": 32}, "cluster: 32 CTAs; at most 16"),
    ({"shared": 300000}, "at most 232448 in all"),
]


@pytest.mark.parametrize("size", ["grid", "block", "cluster"])
def test_sizes_are_integers(size: str) -> None:
    with pytest.raises(TypeError, match=f"{size}: got 1.5; expected one to three integers"):
        run("", OUT, **{size: 1.5})


@pytest.mark.parametrize(("launch", "message"), LAUNCHES)
def test_launches(launch: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("", OUT, **launch)


def test_what_a_kernel_requires() -> None:
    source = text("").replace(
        ".param .u64 out) {",
        ".param .u64 out) .reqntid 64, 1, 1 .explicitcluster .reqnctapercluster 2 {",
    )
    device = em.Device()
    device.launch(source, "k", 2, 64, [OUT])
    with pytest.raises(ValueError, match=r"block: got .* the kernel requires"):
        device.launch(source, "k", 2, 32, [OUT])
    with pytest.raises(ValueError, match=r"cluster: got .* the kernel requires"):
        device.launch(source, "k", 2, 64, [OUT], cluster=1)
    with pytest.raises(ValueError, match="block: 96 threads; at most 64"):
        device.launch(source.replace(".reqntid", ".maxntid"), "k", 2, 96, [OUT])


def test_targets_and_entries() -> None:
    with pytest.raises(ValueError, match="choose one of sm_90a, sm_100a, sm_103a"):
        em.Device("sm_80")
    with pytest.raises(em.PtxError, match="entry: 'other' is not in the module, which has k"):
        em.Device().launch(text(""), "other", 1, 1, [OUT])
    for target, device, fits in [
        ("sm_90a", "sm_90a", True), ("sm_90a", "sm_100a", False), ("sm_100a", "sm_90a", False),
        ("sm_80", "sm_100a", True), ("sm_100f", "sm_100a", True), ("sm_103a", "sm_100a", False),
        ("sm_103a", "sm_103a", True), ("sm_100f", "sm_103a", True), ("sm_100a", "sm_103a", False),
    ]:  # fmt: skip
        source = text("", target=target)
        if fits:
            em.Device(device).launch(source, "k", 1, 1, [OUT])
        else:
            with pytest.raises(
                em.PtxError, match=f"the PTX is for {target}, the device is {device}"
            ):
                em.Device(device).launch(source, "k", 1, 1, [OUT])


def test_shared_memory_of_other_kernels_is_not_counted() -> None:
    big = ".visible .entry other() { .shared .b8 s[200000]; mov.u32 %r, s; ret; }\n".replace(
        "mov.u32 %r, s;", ""
    )
    run(".shared .b8 s[100000]; st.shared.u32 [s], 1;", OUT, before=big)
    with pytest.raises(em.PtxError, match="entry"):
        em.Device().launch(HEAD.format(target="sm_90a"), "k", 1, 1, [])
