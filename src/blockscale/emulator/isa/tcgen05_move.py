"""tcgen05.ld, .st, .cp and .shift: what moves in and out of Tensor Memory. PTX ISA 9.7.16.8, .9."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..machine.engine import Work
from ..machine.ports import read_shared
from ..machine.registers import Loading
from ..machine.state import Fragment, Step
from ..machine.tensor_memory import Region, reached, tensor_memory
from ..machine.undefined import fetched, fill, gathered
from ..ptx.program import Immediate, Register, Vector
from ..tensorcore.descriptors import tcgen05_descriptor
from ..tensorcore.operands import operand_bytes
from ..tensorcore.tmem import (
    COPY_SHAPES,
    SHIFT_LANES,
    SHIFT_WORDS,
    copy_places,
    decompress,
    load_places,
    packed_places,
)
from .bulk import one_by_one
from .copies import groups
from .registry import Form, instruction
from .tcgen05 import aligned, cta_group, enqueue, for_warps, pair, split_address, uniform

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_NUMS = tuple(f"x{1 << i}" for i in range(8))
_COPIES = tuple(COPY_SHAPES)
_MULTICASTS = ("warpx2::02_13", "warpx2::01_23", "warpx4")


def _halves(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    lanes, columns = packed_places(*arguments)
    return lanes[..., None], columns


def _copied(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    lanes, columns = copy_places(*arguments)
    return lanes[..., None], columns


def _shape(form: Form, address_at: int, values_at: int, pack: str) -> Any:
    """Common to ld and st: (function of warp and address -> region, registers)."""
    form.needs("sm_100f")
    aligned(form)
    shape, num = form.one(*_SHAPES), form.one(*_NUMS)
    if shape is None or num is None:
        raise form.error(f"expected one of .{', .'.join(_SHAPES)} and .x1 to .x128")
    packed = form.has(pack)
    form.type("b32")
    address = form.address(address_at)
    half = None
    if shape == "16x32bx2":
        second = 2 if address_at else 1
        if not isinstance(form.operand(second), Immediate):
            raise form.error("the offset of the second half must be an immediate")
        half = form.get(second, "u32")
        values_at += 0 if address_at else 1
    if not isinstance(form.operand(values_at), Vector):
        raise form.error("expected registers in braces")
    items = form.items(values_at)
    places = _halves if packed else load_places

    def find(w: Fragment) -> Region:
        warp = int(w.threads[0]) // 32 % 4
        lane, column = split_address(uniform(form, address(w), "the address"))
        offset = 0 if half is None else uniform(form, half(w), "the offset of the second half")
        within = lane % 32
        if within not in ((0,) if shape == "32x32b" else (0, 16)):
            raise form.error(
                f"lane {lane} of the address: .{shape} begins at lane 0 "
                f"{'' if shape == '32x32b' else 'or 16 '}of the 32 of a warp"
            )
        if lane - within != 32 * warp:  # the hardware ignores the bits that say which warp
            w.cta.launch.alarms.tell(
                "tmem_lanes",
                form.error(
                    f"lane {lane} of the address is not of warp {warp} of its group, which reaches "
                    f"lanes {32 * warp} to {32 * warp + 31}"
                ),
                w.site(),
            )
        return reached(places, (shape, int(num[1:]), warp, offset), within, column)

    registers = load_places(shape, int(num[1:]), 0)[0].shape[1]
    if len(items) != registers:
        raise form.error(f"has {len(items)} registers, .{shape}.{num} takes {registers}")
    return find, items, packed


@instruction("tcgen05.ld", control=True)
def load(form: Form) -> Step:
    """The registers are in flight until tcgen05.wait::ld, or until one of them is used."""
    find, items, packed = _shape(form, 1, 0, "pack::16b")
    slots = form.asynchronous(items)
    form.results += slots

    def run(w: Fragment) -> None:
        region = find(w)
        memory, frame, threads = tensor_memory(w.cta), w.frame, w.threads

        def words(work: Work) -> np.ndarray:
            if not packed:
                return memory.read(work, region)
            halves = memory.read(work, region) & np.uint32(0xFFFF)
            return np.asarray(halves[..., 0] | halves[..., 1] << np.uint32(16))

        def read(work: Work) -> None:
            fill(frame, slots, threads, *fetched(work, lambda: words(work)))

        cluster = w.cta.cluster
        actor = cluster.begin(w, tensor=True)
        work = Work(w, read, needs=(w.cta,), actor=actor)
        Loading(w, slots, work)
        groups(w.cta, "tcgen05.ld").add(threads[:1], work)
        cluster.engine.submit(work)

    return for_warps(form, run)


def _halved(words: np.ndarray) -> np.ndarray:
    return np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], -1)


@instruction("tcgen05.st", control=True)
def store(form: Form) -> Step:
    find, items, packed = _shape(form, 0, 1, "unpack::16b")
    gets = [form.get(item, "b32") for item in items]
    slots = [item.slot if isinstance(item, Register) else None for item in items]

    def run(w: Fragment) -> None:
        region = find(w)
        memory = tensor_memory(w.cta)
        words = np.stack([np.broadcast_to(get(w), w.n) for get in gets], 1)
        found = gathered(w.frame, slots, w.sel)

        def write(work: Work) -> None:
            if packed:
                halved = found and found.through(_halved)
                memory.write(work, region, _halved(words), halved)
            else:
                memory.write(work, region, words, found)

        cluster = w.cta.cluster
        actor = cluster.begin(w, tensor=True)
        work = Work(w, write, needs=(w.cta,), actor=actor)
        groups(w.cta, "tcgen05.st").add(w.threads[:1], work)
        cluster.engine.submit(work)

    return for_warps(form, run)


@instruction("tcgen05.cp")
def copy(form: Form) -> Step:
    """From the shared memory of each CTA to its own Tensor Memory."""
    form.needs("sm_100f")
    group = cta_group(form)
    shape, multicast = form.one(*_COPIES), form.one(*_MULTICASTS)
    if shape is None:
        raise form.error(f"expected one of .{', .'.join(_COPIES)}")
    target, source = form.has("b8x16"), form.one("b6x16_p32", "b4x16_p64")
    if target != (source is not None):
        raise form.error("expected .b8x16 and .b6x16_p32 or .b4x16_p64 together")
    copy_places(shape, multicast)  # refuses what does not go together
    rows, row_bytes = COPY_SHAPES[shape]
    address, descriptor = form.address(0), form.get(1, "b64")

    def run(w: Fragment) -> None:
        lane, column = split_address(int(np.max(address(w))))
        try:
            matrix = tcgen05_descriptor(int(np.max(descriptor(w))))
        except ValueError as error:
            raise form.error(str(error)) from None
        chunks = operand_bytes(matrix, rows, row_bytes, "k")[:, ::16]
        ctas = pair(w.cta, group)

        def words(data: np.ndarray) -> np.ndarray:
            data = data.reshape(rows, row_bytes)
            if source is not None:
                data = decompress(data, source)
            return np.ascontiguousarray(data).view(np.uint32)[None]

        def move(work: Work) -> None:
            for cta in ctas:
                where = chunks.ravel().astype(np.uint64) + np.uint64(cta.shared_base)
                data, found = fetched(work, partial(read_shared, work, where, 16))
                region = reached(_copied, (shape, multicast), lane, column)
                found = found and found.through(words)
                tensor_memory(cta).write(work, region, words(data), found)

        enqueue(w, move, ctas)

    return one_by_one(run)


@instruction("tcgen05.shift")
def shift(form: Form) -> Step:
    """Rows of 32 bytes move down by one lane, in all lanes of each 32 but the last."""
    form.needs("sm_100a", "sm_103a")
    group = cta_group(form)
    if not form.has("down"):
        raise form.error("expected .down")
    address = form.address(0)

    def run(w: Fragment) -> None:
        lane, column = split_address(int(np.max(address(w))))
        if lane % 32:
            raise form.error(f"lane {lane} of the address is not a multiple of 32")
        ctas = pair(w.cta, group)
        columns = column + np.arange(SHIFT_WORDS)
        lanes = (np.arange(lane, 128, 32)[:, None] + np.array(SHIFT_LANES)).reshape(-1, 1)
        above, below = Region(lanes + 1, columns), Region(lanes, columns)

        def move(work: Work) -> None:
            for cta in ctas:
                memory = tensor_memory(cta)
                memory.write(work, below, *fetched(work, partial(memory.read, work, above)))

        enqueue(w, move, ctas)

    return one_by_one(run)
