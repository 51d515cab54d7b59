"""tensormap.replace and tensormap.cp_fenceproxy: PTX ISA 9.7.9.28 and 9.7.13.16.

Forms as ptxas 13.0 takes them. Kernels get a map by value, copy it to where it may be written,
change it, and copy a box with it.
"""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asynchronous import ORDERS, aligned, outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em
from blockscale.emulator.memory.tensormap import TensorMap
from blockscale.emulator.memory.tensormap_bits import ELEMENTS
from blockscale.emulator.memory.tensormap_bits import replace as replaced

RNG = np.random.default_rng(928)
FEW = (*ORDERS[:2], ORDERS[-1])
TOLD = "mbarrier::complete_tx::bytes"
PARAMETERS = ".param .u64 in, .param .u64 room, .param .align 64 .b8 tm[128]"
SIZE = 1024  # bytes of the image that is given back, at most
#: The map's 128 bytes go to m in shared memory; %rd4 is where it is to be in global memory.
HEAD = f""".shared .align 1024 .b8 s[{SIZE}]; .shared .align 128 .b8 m[128]; .shared .align 8 .b64 bar;
    mov.u32 %r1, s; mov.u32 %r3, m; setp.eq.u32 %p1, %t, 0; ld.param.u64 %rd1, [in]; ld.param.u64 %rd4, [room];
    cvt.u64.u32 %rd6, %r3; cvta.shared.u64 %rd6, %rd6;
    mov.b64 %rd2, tm; mul.wide.u32 %rd3, %t, 4; add.u64 %rd2, %rd2, %rd3; ld.param.b32 %r4, [%rd2];
    shl.b32 %r5, %t, 2; add.u32 %r6, %r5, %r3; st.shared.b32 [%r6], %r4;
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;
"""
FENCE = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd4], [%r3], 128;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd4], 128;"
#: The same for a map that is changed where it is.
IN_PLACE = "add.u64 %rd3, %rd3, %rd4; ld.shared.b32 %r4, [%r6]; st.global.b32 [%rd3], %r4; bar.warp.sync -1;\n"
#: Addresses of this machine are not to stay in memory that is compared.
CLEAR = "mul.wide.u32 %rd3, %t, 4; add.u64 %rd3, %rd3, %rd4; st.global.b32 [%rd3], 0;"
RELEASE = "bar.warp.sync -1; fence.proxy.tensormap::generic.release.gpu; bar.warp.sync -1;\n"


def kernel(body: str, target: str = "sm_90a") -> str:
    return text(HEAD + body, PARAMETERS, target=target)


def changes(lines: Sequence[str], where: str) -> str:
    """``lines`` with {ss} and {at} of one of three ways to name a map, which is then published."""
    space, at = {
        "shared": (".shared::cta", "%r3"),
        "generic": ("", "%rd6"),
        "global": (".global", "%rd4"),
    }[where]
    body = "".join(
        f"@%p1 tensormap.replace.tile.{line.format(ss=space, at=f'[{at}]')}\n" for line in lines
    )
    if where == "global":
        return IN_PLACE + body + RELEASE + ACQUIRE
    return body + f"bar.warp.sync -1; {FENCE} {ACQUIRE}"


def load(rank: int, size: int, starts: Sequence[int]) -> str:
    """A box through the map at %rd4, its image to out."""
    at = ", ".join(map(str, starts))
    return f"""@!%p1 bra N; mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.{TOLD} [s], [%rd4, {{{at}}}], [bar];
    N: W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    L: setp.ge.u32 %p2, %r5, {size}; @%p2 bra M; add.u32 %r7, %r1, %r5; ld.shared.u32 %r8, [%r7];
    cvt.u64.u32 %rd7, %r5; add.u64 %rd7, %rd7, %out; st.global.u32 [%rd7], %r8;
    add.u32 %r5, %r5, 128; bra L;
    M: {CLEAR}"""


def field(name: str, *operands: object, type: str = "b32") -> str:
    """tensormap.replace.tile of one field."""
    return f"{name}{{ss}}.b1024.{type} {{at}}, {', '.join(map(str, operands))};"


ADDRESS = field("global_address", "%rd1", type="b64")


def image(
    array: np.ndarray, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], starts: Sequence[int],
    steps: Sequence[int] = (1, 1, 1, 1, 1), fill: bytes = b"",
) -> np.ndarray:  # fmt: skip
    """The elements of a box, one at a time; all innermost first, strides in elements, from 1 up."""
    flat, out = array.reshape(-1), []
    ranges = [
        range(0, n, step if d else 1) for d, (n, step) in enumerate(zip(box, steps, strict=False))
    ]
    for index in itertools.product(*ranges[::-1]):
        at = [i + s for i, s in zip(index[::-1], starts, strict=True)]
        inside = all(0 <= i < n for i, n in zip(at, shape, strict=True))
        place = sum(i * n for i, n in zip(at, (1, *strides), strict=True)) if inside else 0
        out.append(flat[place].tobytes() if inside else fill or bytes(array.itemsize))
    return np.frombuffer(b"".join(out), np.uint8)


DATA = RNG.integers(0, 1 << 32, 4096, np.uint32)
#: What the host encodes: 16 x 8 words of rows of 32, and a box of 8 x 4.
BASE: dict[str, Any] = {"element": "u32", "shape": (16, 8), "strides": (128,), "box": (8, 4)}


FIELDS: dict[str, tuple[list[str], int, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    # name: lines, rank, starts, the model's arguments, the map's
    "nothing": ([], 2, (4, 2), {}, {}),
    "address": (
        ["global_address{ss}.b1024.b64 {at}, %rd8;"], 2, (4, 2), {"skip": 64}, {},
    ),
    "dims": ([field("global_dim", 0, 7), field("global_dim", 1, "%r9")], 2, (4, 0), {"shape": (7, 3)}, {}),
    "stride": ([field("global_stride", 0, "%rd9", type="b64")], 2, (4, 2), {"strides": (20,)}, {}),
    "box": ([field("box_dim", 0, 12), field("box_dim", 1, "%r9")], 2, (4, 2), {"box": (12, 3)}, {}),
    "steps": ([field("element_stride", 0, 1), field("element_stride", 1, "%r9")], 2, (4, 0), {"steps": (1, 3)}, {}),
    "fewer dimensions": ([field("rank", 0)], 1, (4,), {"shape": (16,), "strides": (), "box": (8,)}, {}),
    "more dimensions": (
        [field("rank", "%r9"), *(field("global_dim", d, n) for d, n in ((2, 3), (3, 2))),
         *(field("box_dim", d, n) for d, n in ((2, 2), (3, 2))), field("element_stride", 2, 1), field("element_stride", 3, 1),
         field("global_stride", 1, 1024, type="b64"), field("global_stride", 2, 4096, type="b64")],
        4, (4, 2, 1, 0),
        {"shape": (16, 8, 3, 2), "strides": (32, 256, 1024), "box": (8, 4, 2, 2)}, {},
    ),
    "five dimensions": (
        [field("rank", 4), *(field("global_dim", d, 2) for d in (2, 3, 4)), *(field("box_dim", d, 2) for d in (2, 3, 4)),
         *(field("element_stride", d, 1) for d in (2, 3, 4)),
         *(field("global_stride", d, n, type="b64") for d, n in ((1, 1024), (2, 2048), (3, 4096)))],
        5, (8, 5, 0, 0, 0),
        {"shape": (16, 8, 2, 2, 2), "strides": (32, 256, 512, 1024), "box": (8, 4, 2, 2, 2)}, {},
    ),
    "type of 2 bytes": (
        [field("elemtype", 1), field("global_dim", 0, 20)], 2, (16, 2),
        {"dtype": "u2", "shape": (20, 8), "strides": (64,)}, {},
    ),
    "type of 8 bytes": ([field("elemtype", 4)], 2, (12, 2), {"dtype": "u8", "strides": (16,)}, {}),
    "fill": (
        [field("fill_mode", 1)], 2, (12, 6), {"fill": 0x7FFFFFFF}, {"element": "f32"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ["shared", "generic", "global"])
@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str, where: str) -> None:
    """%r9 is 3, %rd8 the array from word 64 on, %rd9 80."""
    lines, rank, starts, model, base = FIELDS[name]
    given = {"shape": (16, 8), "strides": (32,), "box": (8, 4)} | model
    data = DATA.view(given.pop("dtype", "u4"))[given.pop("skip", 0) :]
    if "fill" in given:
        given["fill"] = given["fill"].to_bytes(4, "little")
    wanted = image(data, **{k: given[k] for k in ("shape", "strides", "box")}, starts=starts,
                   **{k: given[k] for k in ("steps", "fill") if k in given})  # fmt: skip
    set_up = "mov.u32 %r9, 3; add.u64 %rd8, %rd1, 256; mov.u64 %rd9, 80;\n"
    args = [
        np.zeros(SIZE, np.uint8), DATA, np.zeros(128, np.uint8),
        lambda out, data, room: TensorMap(data.ctypes.data, **(BASE | base), array=data),
    ]  # fmt: skip
    body = set_up + changes(lines, where) + "\n" + load(rank, len(wanted), starts)
    out = outcome(kernel(body), args, orders=FEW)[0]
    if "fill" not in given:
        np.testing.assert_array_equal(out[: len(wanted)], wanted)
        return
    words, expected = out[: len(wanted)].view(np.uint32), wanted.view(np.uint32)
    filled = expected == 0x7FFFFFFF
    np.testing.assert_array_equal(words[~filled], expected[~filled])
    assert np.isnan(words[filled].view(np.float32)).all()


@pytest.mark.parametrize("where", ["shared", "global"])
@pytest.mark.parametrize(("code", "span"), [(0, 0), (1, 32), (2, 64), (3, 128)])
def test_swizzles(code: int, span: int, where: str) -> None:
    """Chunks of 16 bytes, their number XORed with that of the line, of 128 bytes, modulo the span."""
    lines = [field("swizzle_mode", code), field("box_dim", 0, 8 if span == 32 else 16)]
    lines += [field("box_dim", 0, span // 4), field("global_dim", 0, 32)] if span else []
    row = span or 64
    out = outcome(
        kernel(changes(lines, where) + "\n" + load(2, 4 * row, (0, 1))),
        [np.zeros(SIZE, np.uint8), DATA, np.zeros(128, np.uint8),
         lambda out, data, room: TensorMap(data.ctypes.data, **BASE, swizzle="64B", array=data)],
        orders=FEW,
    )[0]  # fmt: skip
    plain = DATA.reshape(-1, 32)[1:5, : row // 4].view(np.uint8).reshape(-1)
    for byte in range(4 * row):
        at = byte ^ (byte >> 7 & max(span // 16 - 1, 0)) << 4
        assert out[at] == plain[byte]


def test_every_lane_its_own_map() -> None:
    """Lane 0 and lane 1 change two maps in one instruction, one after the other is used."""
    body = f"""setp.lt.u32 %p4, %t, 2; mul.wide.u32 %rd10, %t, 128; add.u64 %rd10, %rd10, %rd4;
    add.u64 %rd3, %rd3, %rd4; ld.shared.b32 %r4, [%r6]; st.global.b32 [%rd3], %r4; st.global.b32 [%rd3+128], %r4; bar.warp.sync -1;
    mad.wide.u32 %rd11, %t, 512, %rd1;
    @%p4 tensormap.replace.tile.global_address.global.b1024.b64 [%rd10], %rd11;
    add.u32 %r9, %t, 3; @%p4 tensormap.replace.tile.global_dim.global.b1024.b32 [%rd10], 1, %r9;
    {RELEASE} add.u64 %rd4, %rd4, 128; {ACQUIRE}
    {load(2, 128, (0, 1))} st.global.b32 [%rd3+-128], 0;"""
    args = [
        np.zeros(SIZE, np.uint8), DATA, np.zeros(256, np.uint8),
        lambda out, data, room: TensorMap(data.ctypes.data, **BASE, array=data),
    ]  # fmt: skip
    out = outcome(kernel(body), args, orders=FEW)[0]
    wanted = image(DATA[128:], (16, 4), (32,), (8, 4), (0, 1))
    np.testing.assert_array_equal(out[:128], wanted)


def test_stores_through_a_changed_map() -> None:
    body = f"""mov.u32 %r9, 2; {changes([field("global_dim", 1, "%r9")], "shared")}
    @!%p1 bra E;
    st.shared.v4.b32 [%r1], {{1, 2, 3, 4}}; st.shared.v4.b32 [s+16], {{5, 6, 7, 8}}; st.shared.v4.b32 [s+32], {{9, 10, 11, 12}};
    fence.proxy.async.shared::cta;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd4, {{4, 0}}], [s];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E: bar.warp.sync -1; {CLEAR}"""
    args = [
        np.zeros((4, 32), np.uint32), DATA, np.zeros(128, np.uint8),
        lambda out, data, room: TensorMap(out.ctypes.data, "u32", (16, 4), (128,), (4, 3), array=out),
    ]  # fmt: skip
    out = outcome(kernel(body), args, orders=FEW)[0]
    wanted = np.zeros((4, 32), np.uint32)
    wanted[:2, 4:8] = np.arange(1, 9).reshape(2, 4)
    np.testing.assert_array_equal(out, wanted)


def test_each_warp_copies_its_own_map() -> None:
    source = text(
        """.shared .align 128 .b8 m[512]; mov.u32 %r3, m; shl.b32 %r5, %t, 2; add.u32 %r6, %r5, %r3; add.u32 %r7, %t, 100;
        st.shared.u32 [%r6], %r7; shr.u32 %r8, %t, 5; shl.b32 %r8, %r8, 7; add.u32 %r9, %r3, %r8;
        cvt.u64.u32 %rd1, %r8; add.u64 %rd1, %rd1, %out; bar.warp.sync -1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.sys.sync.aligned [%rd1], [%r9], 128;"""
    )
    out = outcome(source, [np.zeros(128, np.uint32)], block=128, orders=FEW)[0]
    assert (out == np.arange(100, 228)).all()


# --- the 128 bytes --------------------------------------------------------------------------------


def full(**more: Any) -> TensorMap:
    given = {
        "address": 1 << 40, "element": "u32", "shape": (64, 5, 6, 7, 8), "strides": (256, 512, 1 << 37, 1 << 39),
        "box": (16, 2, 3, 4, 5), "element_strides": (1, 2, 3, 4, 5), "oob_fill": "zeros", "swizzle": "none",
    }  # fmt: skip
    return TensorMap(**(given | more))


def live(raw: bytes) -> bytes:
    """Without the notes of the driver."""
    return raw[:64]


@pytest.mark.parametrize("place", range(5))
def test_bits_of_placed_fields(place: int) -> None:
    """One field changed is the map that the driver would write with it; the other bits stay."""
    old = full()
    for name, attribute, value in (
        ("global_dim", "shape", (1 << 32) - 4), ("box_dim", "box", 4), ("element_stride", "element_strides", 8),
        ("global_stride", "strides", (1 << 40) - 16),
    ):  # fmt: skip
        given = list(getattr(old, attribute))
        if place < len(given):
            given[place] = value
            raw = replaced(old.encode(), name, place, value)
            assert live(raw) == live(full(**{attribute: given}).encode()), name
            assert raw[64:] == old.encode()[64:]


CODES = {
    # table 33 of the ISA
    "elemtype": [
        "u8",
        "u16",
        "u32",
        "s32",
        "u64",
        "s64",
        "f16",
        "f32",
        "f32_ftz",
        "f64",
        "bf16",
        "tf32",
        "tf32_ftz",
        "b4x16_align8",
        "b4x16_align16",
        "b6x16_align16",
    ],
    "interleave_layout": ["none", "16B", "32B"],
    "swizzle_mode": ["none", "32B", "64B", "128B"],
    "swizzle_atomicity": ["128B", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B"],
    "fill_mode": ["zeros", "nan"],
}


@pytest.mark.parametrize(
    ("name", "code"), [(name, code) for name, codes in CODES.items() for code in range(len(codes))]
)
def test_bits_of_modes(name: str, code: int) -> None:
    attribute = {
        "elemtype": "element",
        "interleave_layout": "interleave",
        "fill_mode": "oob_fill",
    }.get(name, "swizzle")
    more: dict[str, Any] = {"shape": (256, 5, 6, 7, 8)}
    if name == "swizzle_atomicity":
        more["swizzle"] = "128B"
    if name == "fill_mode":
        more["element"] = "f32"
    if name == "elemtype":
        more["box"] = (128, 1, 1, 1, 1)
    if name == "swizzle_mode":
        more["box"] = (8, 1, 1, 1, 1)
    old = full(**more).encode()
    assert live(replaced(old, name, 0, code)) == live(
        full(**(more | {attribute: CODES[name][code]})).encode()
    )


def test_every_element_type_has_a_code() -> None:
    assert set(CODES["elemtype"]) == set(ELEMENTS)


def test_bits_of_rank_and_address() -> None:
    old = full()
    assert TensorMap.decode(replaced(old.encode(), "rank", 0, 2)) == full(
        shape=old.shape[:3],
        strides=old.strides[:2],
        box=old.box[:3],
        element_strides=old.element_strides[:3],
    )
    assert TensorMap.decode(replaced(old.encode(), "global_address", 0, 4096)) == replace(
        old, address=4096
    )


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "says"), [
    ([field("box_dim", 0, "%r9")], "box_dim 300; allowed are 1 to 256"),
    ([field("element_stride", 1, "%r9")], "element_stride 300; allowed are 1 to 8"),
    ([field("rank", "%r9")], "rank 300; allowed are 0 to 4"),
    ([field("global_stride", 0, "%rd9", type="b64")], "global_stride 300; allowed are 0 to .* multiples of 16"),
    ([ADDRESS.replace("%rd1", "%rd9")], "address: got 300; must be a multiple of 16"),
    ([field("rank", 2)], "rank 3, not 2|must be"),
    (["rank{ss}.b1024.b32 [%rd9+32], 1;"], "not a multiple of 64|out of bounds"),
])  # fmt: skip
def test_wrong_values(lines: list[str], says: str) -> None:
    body = (
        f"mov.u32 %r9, 300; mov.u64 %rd9, 300; {changes(lines, 'shared')}\n{load(2, 128, (0, 0))}"
    )
    args = [
        aligned(np.zeros(SIZE, np.uint8)), aligned(DATA), aligned(np.zeros(128, np.uint8)),
    ]  # fmt: skip
    with pytest.raises(em.PtxError, match=says):
        em.Device().launch(
            kernel(body), "k", 1, 32, [*args, TensorMap(args[1].ctypes.data, **BASE)]
        )


def test_a_map_that_was_not_filled() -> None:
    body = text(
        ".shared .align 128 .b8 m[128]; tensormap.replace.tile.rank.shared::cta.b1024.b32 [m], 1;"
    )
    for error in refusal(body, [np.zeros(32, np.uint32)], em.Uninitialized, orders=FEW):
        assert "tensormap.replace" in str(error)


def test_changes_race_with_other_warps() -> None:
    body = """.shared .align 128 .b8 m[128]; mov.u32 %r3, m; shl.b32 %r5, %t, 2; add.u32 %r6, %r5, %r3; setp.lt.u32 %p1, %t, 32;
    @%p1 st.shared.u32 [%r6], 0; setp.eq.u32 %p2, %t, 32;
    @%p2 tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r3], 1; // CHANGE"""
    for error in refusal(
        text(body), [np.zeros(64, np.uint32)], (em.DataRace, em.Uninitialized), block=64, orders=FEW
    ):
        assert error.line == line_of(text(body), "// CHANGE")


def test_lanes_agree_on_the_copy() -> None:
    body = f"mad.wide.u32 %rd4, %t, 128, %rd4; {FENCE}"
    args = [aligned(np.zeros(SIZE, np.uint8)), aligned(DATA), aligned(np.zeros(4096, np.uint8))]
    with pytest.raises(em.PtxError, match="different addresses"):
        em.Device().launch(
            kernel(body), "k", 1, 32, [*args, TensorMap(args[1].ctypes.data, **BASE)]
        )


# --- forms ----------------------------------------------------------------------------------------

R = "tensormap.replace.tile"
F = "tensormap.cp_fenceproxy"
# Refused by ptxas 13.0 for sm_90a and sm_100a.
ILLEGAL = [
    f"{R}.global_address.shared.b1024.b64 [%r1], %rd2;",
    f"{R}.global_address.shared::cluster.b1024.b64 [%r1], %rd2;",
    f"{R}.global_address.param.b1024.b64 [%rd1], %rd2;",
    f"{R}.global_address.global.b1024.b32 [%rd1], %r2;",
    f"{R}.global_address.global.b64 [%rd1], %rd2;",
    "tensormap.replace.global_address.global.b1024.b64 [%rd1], %rd2;",
    "tensormap.replace.im2col.global_address.global.b1024.b64 [%rd1], %rd2;",
    f"{R}.rank.global.b1024.u32 [%rd1], %r2;",
    f"{R}.rank.global.b1024.b64 [%rd1], %rd2;",
    f"{R}.rank.global.b1024.b32 [%rd1], 0, 3;",
    f"{R}.box_dim.global.b1024.b32 [%rd1], 5, %r2;",
    f"{R}.box_dim.global.b1024.b32 [%rd1], -1, %r2;",
    f"{R}.box_dim.global.b1024.b32 [%rd1], %r3, %r2;",
    f"{R}.box_dim.global.b1024.b32 [%rd1], %r2;",
    f"{R}.global_dim.global.b1024.b32 [%rd1], 5, %r2;",
    f"{R}.global_dim.global.b1024.b64 [%rd1], 1, %rd2;",
    f"{R}.global_stride.global.b1024.b64 [%rd1], 5, %rd2;",
    f"{R}.global_stride.global.b1024.b32 [%rd1], 0, %r2;",
    f"{R}.element_stride.global.b1024.b32 [%rd1], 5, %r2;",
    f"{R}.element_size.global.b1024.b32 [%rd1], 0, %r2;",
    f"{R}.elemtype.global.b1024.b32 [%rd1], 16;",
    f"{R}.elemtype.global.b1024.b32 [%rd1], -1;",
    f"{R}.elemtype.global.b1024.b32 [%rd1], %r2;",
    f"{R}.elemtype.global.b1024.b32 [%rd1], 0, 3;",
    f"{R}.interleave_layout.global.b1024.b32 [%rd1], 3;",
    f"{R}.interleave_layout.global.b1024.b32 [%rd1], %r2;",
    f"{R}.swizzle_mode.global.b1024.b32 [%rd1], 4;",
    f"{R}.swizzle_mode.global.b1024.b32 [%rd1], %r2;",
    f"{R}.swizzle_atomicity.global.b1024.b32 [%rd1], 4;",
    f"{R}.fill_mode.global.b1024.b32 [%rd1], 2;",
    f"{R}.fill_mode.global.b1024.b32 [%rd1], %r2;",
    f"{F}.global.shared::cta.tensormap::generic.release.sync.aligned [%rd1], [%r1], 128;",
    f"{F}.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], 64;",
    f"{F}.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], %r2;",
    f"{F}.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1];",
    f"{F}.global.shared::cta.tensormap::generic.acquire.gpu.sync.aligned [%rd1], [%r1], 128;",
    f"{F}.global.shared::cta.tensormap::generic.release.gpu.sync [%rd1], [%r1], 128;",
    f"{F}.global.shared.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], 128;",
    f"{F}.shared::cta.global.tensormap::generic.release.gpu.sync.aligned [%r1], [%rd1], 128;",
    f"{F}.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], 128;",
]


def refused(line: str, target: str) -> bool:
    source = text(f"bra E;\n{line}\nE:", target=target)
    device = em.Device("sm_90a" if "90" in target else "sm_100a")
    error = None
    try:
        device.launch(source, "k", 1, 32, [np.zeros(32, np.uint32)])
    except em.PtxError as caught:
        error = caught
    return error is not None and error.line == line_of(source, line)


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_forms(line: str) -> None:
    assert refused(line, "sm_90a")
    assert refused(line, "sm_100a")


# A line and the targets for which ptxas 13.0 takes it, of these five.
TARGETS = ("sm_90", "sm_90a", "sm_100", "sm_100f", "sm_100a")
TAKEN = [
    (f"{R}.global_address.b1024.b64 [%r1], 64;", "sm_90a sm_100f sm_100a"),
    (f"{R}.elemtype.global.b1024.b32 [%rd1], 12;", "sm_90a sm_100f sm_100a"),
    (f"{R}.elemtype.global.b1024.b32 [%rd1], 13;", "sm_100f sm_100a"),
    (f"{R}.elemtype.global.b1024.b32 [%rd1], 15;", "sm_100f sm_100a"),
    (f"{R}.swizzle_atomicity.global.b1024.b32 [%rd1], 0;", "sm_100f sm_100a"),
    (
        f"{F}.global.shared::cta.tensormap::generic.release.cluster.sync.aligned [%rd1], [%r1], 128;",
        " ".join(TARGETS),
    ),
]


@pytest.mark.parametrize(("line", "taken"), TAKEN)
def test_targets(line: str, taken: str) -> None:
    assert [target for target in TARGETS if not refused(line, target)] == taken.split()
