"""tcgen05.mma: products into Tensor Memory, of one CTA or of a pair. PTX ISA 9.7.16.10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..machine.engine import Work
from ..machine.matrix_operands import (
    Codes,
    Operand,
    container_bits,
    from_shared,
    negated,
    undefined_products,
)
from ..machine.state import CTA, Fragment, Step
from ..machine.tensor_memory import COLUMNS, Region, reached, tensor_memory
from ..machine.undefined import Undefined, View, fetched
from ..ptx.program import Address, Immediate, PtxError, Vector
from ..tensorcore.arithmetic import Instruction, multiply
from ..tensorcore.descriptors import (
    InstructionDescriptor,
    SharedDescriptor,
    instruction_descriptor,
    tcgen05_descriptor,
)
from ..tensorcore.tmem import (
    accumulator_places,
    operand_copies,
    operand_places,
    scale_copies,
    scale_places,
)
from .bulk import one_by_one
from .registry import Form, first, instruction
from .tcgen05 import cta_group, enqueue, pair, split_address

_KINDS = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")
#: Scales of a row that one instruction takes, by kind and qualifier; 9.7.16.10.7.
_VECTORS = {
    "mxf8f6f4": {"": "1X", "block32": "1X", "scale_vec::1X": "1X"},
    "mxf4": {"": "2X", "block32": "2X", "scale_vec::2X": "2X"},
    "mxf4nvf4": {
        "block32": "2X", "scale_vec::2X": "2X", "block16": "4X", "scale_vec::4X": "4X",
    },
}  # fmt: skip
_COLLECTORS = tuple(
    f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")
)  # what the unit keeps of A between instructions: no effect on results
#: CUTLASS keeps SFA_ID and SFB_ID in the two highest bits, too; the hardware does without them.
_SCALE_ADDRESS = (1 << 30) - 1


@dataclass(frozen=True, slots=True)
class Multiplication:
    """One tcgen05.mma, with everything it was given."""

    shape: InstructionDescriptor
    group: int
    vector: str  # "" without block scaling
    a: SharedDescriptor | int  # an int: address in Tensor Memory
    b: SharedDescriptor
    d: int
    scales: tuple[int, int] | None
    accumulate: bool
    scale_d: int
    disabled: np.ndarray | None  # (group, 128) lanes of D that are not written
    exact: bool

    def run(self, work: Work, ctas: tuple[CTA, ...]) -> None:
        shape, group = self.shape, self.group
        packed = shape.kind in ("mxf4", "mxf4nvf4")
        rows = Operand(
            shape.m // group, shape.k, shape.a_type, _major(shape.transpose_a), packed,
            shape.negate_a,
        )  # fmt: skip
        columns = Operand(
            shape.n // group, shape.k, shape.b_type, _major(shape.transpose_b), packed,
            shape.negate_b,
        )  # fmt: skip
        b = _together([from_shared(work, cta, self.b, columns) for cta in ctas])
        for rank, cta in enumerate(ctas):
            if isinstance(self.a, int):
                a = self._from_tensor(work, cta, rows)
            else:
                a = from_shared(work, cta, self.a, rows)
            self._multiply(work, cta, rank, a, b)

    def _multiply(self, work: Work, cta: CTA, rank: int, a: Codes, b: Codes) -> None:
        shape, memory = self.shape, tensor_memory(cta)
        lane, column = split_address(self.d)
        region = reached(accumulator_places, (shape.m, shape.n, self.group, rank), lane, column)
        half = shape.d_type == "f16"
        c = before = None
        if self.accumulate:
            words, before = fetched(work, partial(memory.read, work, region))
            c = words.astype(np.uint16).view(np.float16) if half else words.view(np.float32)
            if self.scale_d:
                c = np.ldexp(c, -self.scale_d)
        types = Instruction("tcgen05", shape.a_type, shape.b_type, shape.d_type)
        sfa = sfb = unsure_a = unsure_b = None
        if self.scales is not None and shape.scale_type is not None:
            vector = shape.k // int(self.vector[0])
            types = replace(types, scale_type=shape.scale_type, vector=vector)
            (sfa, unsure_a), (sfb, unsure_b) = (
                fetched(work, partial(self._scales, work, cta, i, len(codes)))
                for i, (codes, _) in enumerate((a, b))
            )
        d = multiply(types, a[0], b[0], c, sfa=sfa, sfb=sfb, exact=self.exact)
        words = d.view(np.uint16).astype(np.uint32) if half else d.view(np.uint32)
        if self.disabled is not None:
            lanes, columns = np.divmod(region.words, COLUMNS)
            keep = ~self.disabled[rank][lanes]
            region, words = Region(lanes[keep], columns[keep]), words[keep]
        unsure = next(filter(None, (before, a[1], b[1], unsure_a, unsure_b)), None)
        found = None
        if unsure is not None:
            bad = undefined_products(a, b, (shape.a_type, shape.b_type))
            if unsure_a is not None:
                bad[unsure_a.bits.any(axis=1)] = True
            if unsure_b is not None:
                bad[:, unsure_b.bits.any(axis=1)] = True
            if before is not None:
                bad[before.bits != 0] = True
            if self.disabled is not None:
                bad = bad[keep]
            found = Undefined(bad * np.uint32(0xFFFFFFFF), unsure.origin)
        if len(words):
            memory.write(work, region, words, found)
        watch = cta.launch.watch
        if watch is not None:
            watch.multiplied(work.what, 1, 2 * len(a[0]) * len(b[0]) * shape.k)

    def _from_tensor(self, work: Work, cta: CTA, operand: Operand) -> Codes:
        codes, found = fetched(work, lambda: self._codes(work, cta, operand))
        return negated(codes, operand), found

    def _codes(self, work: Work, cta: CTA, operand: Operand) -> np.ndarray:
        assert isinstance(self.a, int)
        bits = 4 if operand.packed else container_bits(operand.type)
        lane, column = split_address(self.a)
        shape = self.shape
        arguments = shape.m, operand.k, bits, self.group
        copies = tuple(operand_copies(shape.m, self.group))
        region = reached(operand_places, arguments, lane, column, copies)
        words = tensor_memory(cta).read(work, region)
        if work.view is not View.MASKS and (words != words[0]).any():
            raise ValueError("the copies of A in Tensor Memory differ, which is not supported")
        words, low = words[0], operand_places(*arguments)[2]
        codes = words >> low.astype(np.uint32) & np.uint32((1 << bits) - 1)
        codes = codes.astype(f"u{max(bits // 8, 1)}")
        if operand.type == "e2m1" and not operand.packed:
            codes = codes >> np.uint8(2) & np.uint8(15)
        return codes

    def _scales(self, work: Work, cta: CTA, which: int, rows: int) -> np.ndarray:
        """(rows, blocks) codes; each 32 lanes hold a copy, and one is read."""
        assert self.scales is not None
        shape = self.shape
        lane, column = split_address(self.scales[which] & _SCALE_ADDRESS)
        halves = 2 if which and (shape.m, self.group) == (128, 2) else 1
        id = (shape.sfa_id, shape.sfb_id)[which]
        arguments = self.vector, rows, id, halves
        region = reached(scale_places, arguments, lane, column, tuple(scale_copies(halves)))
        words, byte = tensor_memory(cta).read(work, region), scale_places(*arguments)[2]
        codes = (words >> (8 * byte).astype(np.uint32)).astype(np.uint8)
        if work.view is not View.MASKS and (codes != codes[0]).any():
            raise ValueError(
                f"the copies of scale_{'ab'[which]} in the four parts of 32 lanes differ"
            )
        return codes[0]


def _together(parts: list[Codes]) -> Codes:
    """The rows of all CTAs."""
    codes = np.concatenate([codes for codes, _ in parts])
    known = [found for _, found in parts if found is not None]
    if not known:
        return codes, None
    bits = [np.zeros_like(each) if found is None else found.bits for each, found in parts]
    return codes, Undefined(np.concatenate(bits), known[0].origin)


def _major(transposed: bool) -> str:
    return "mn" if transposed else "k"


def _scale_vector(form: Form, kind: str) -> str:
    """Scales of a row, as the qualifiers say or leave to the kind; "" without block scaling."""
    scaled = form.has("block_scale")
    if scaled != (kind in _VECTORS):
        raise form.error(f".block_scale goes with the kinds {', '.join(_VECTORS)}")
    if not scaled:
        return ""
    given = form.one("block16", "block32", *(f"scale_vec::{n}X" for n in (1, 2, 4))) or ""
    if given not in _VECTORS[kind]:
        raise form.error(f"kind::{kind} takes one of .{', .'.join(_VECTORS[kind])}")
    if given.startswith("scale_vec"):  # the family has .block16 and .block32 alone
        form.needs("sm_100a", "sm_103a")
    return _VECTORS[kind][given]


def _disabled_lanes(form: Form, at: int, group: int) -> Callable[[Fragment], np.ndarray]:
    """Which lanes of D are not written: (group, 128), from the words of an operand."""
    gets = [form.get(item, "b32") for item in form.items(at)]
    if len(gets) != 4 * group:
        raise form.error(f"has {len(gets)} words of lanes, .cta_group::{group} takes {4 * group}")

    def lanes(w: Fragment) -> np.ndarray:
        words = np.array([first(get(w)) for get in gets], "<u4")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bits.astype(bool).reshape(group, 128)

    return lanes


def _scale_of_d(form: Form, at: int, kind: str) -> int:
    """D is scaled by two to the minus this: an operand of two kinds, which may be left out."""
    if kind not in ("f16", "tf32") or len(form.ins.operands) <= at:
        return 0
    scale = form.operand(at)
    if not isinstance(scale, Immediate) or not 0 <= scale.value <= 15:
        raise form.error("scale-input-d must be an immediate from 0 to 15")
    return int(scale.value)


@instruction("tcgen05.mma")
def mma(form: Form) -> Step:
    """[d], a-desc or [a], b-desc, idesc, then [scale-a], [scale-b], enable-d; or, without scales,
    lanes not to write, enable-d, scale of d. Sparse (.sp) and .ws forms are not supported."""
    form.needs("sm_100f")
    group = cta_group(form)
    kind = form.one(*(f"kind::{name}" for name in _KINDS))
    if kind is None or kind == "kind::i8":
        raise form.error(f"expected one of .kind::{', .kind::'.join(_KINDS)}; i8 is not supported")
    kind = kind.removeprefix("kind::")
    vector = _scale_vector(form, kind)
    form.one(*_COLLECTORS)
    d, b_of, shape_of = form.address(0), form.get(2, "b64"), form.get(3, "b32")
    in_tensor = isinstance(form.operand(1), Address)
    a_of = form.address(1) if in_tensor else form.get(1, "b64")
    at = 4
    scales = lanes_of = None
    if vector:
        scales = form.address(4), form.address(5)
        at += 2
    elif isinstance(form.operand(at), Vector):
        lanes_of = _disabled_lanes(form, at, group)
        at += 1
    enable = form.get(at, "pred")
    scale_d = _scale_of_d(form, at + 1, kind)

    def described(w: Fragment) -> Multiplication:
        shape = instruction_descriptor(first(shape_of(w)), kind, group)
        if shape.sparse:
            raise form.error("the instruction descriptor says sparse, the opcode does not")
        a: SharedDescriptor | int = first(a_of(w))
        if not in_tensor:
            a = tcgen05_descriptor(first(a_of(w)))
        disabled = None if lanes_of is None else lanes_of(w)
        return Multiplication(
            shape, group, vector, a, tcgen05_descriptor(first(b_of(w))), first(d(w)),
            None if scales is None else (first(scales[0](w)), first(scales[1](w))),
            bool(np.max(enable(w))), scale_d, disabled,
            w.cta.launch.settings.exact,
        )  # fmt: skip

    def run(w: Fragment) -> None:
        try:
            todo = described(w)
        except PtxError:
            raise
        except ValueError as error:  # of a descriptor
            raise form.error(str(error)) from None
        ctas = pair(w.cta, group)
        enqueue(w, lambda work: todo.run(work, ctas), ctas)

    return one_by_one(run)
