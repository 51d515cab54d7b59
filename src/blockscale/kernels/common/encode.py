# mypy: ignore-errors
"""The numerics of a format on CuTe DSL values: block maximum, scale, elements.

Bit for bit ``reference.quantize``. The maximum and a power-of-two scale are found in integers:
magnitudes of floats are ordered as their bits are, and infinities and NaNs come out on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import numpy as np
from cutlass import Float32, Uint32, cute

from ...dtypes import BFLOAT16, FLOAT16
from ...formats import get_format
from ...rounding import FP32_INF, FP32_MAX, FP32_NAN
from . import ptx
from .arithmetic import element
from .e2m1 import e2m1_of_eight
from .spec import NEAREST_FP32, NEAREST_UE4M3, POWER_OF_TWO, Spec
from .stochastic import stochastic_codes

__all__ = ["Encoder"]

_MIN_NORMAL = 0x00800000
_HALF_INF = {BFLOAT16: 0x7F80, FLOAT16: 0x7C00}


@dataclass(frozen=True)
class Encoder:
    """How blocks of ``dtype`` become a scale and elements ("e4m3", "e5m2" or "e2m1").

    A "state" is a running maximum in one word: the magnitudes of two 16-bit elements, or of one
    fp32 element. Under nonfinite="te" a NaN counts as zero in it.

    Attributes:
        largest: what the largest element of a block becomes, of each UE4M3 scale that is tried;
            empty for the element's largest value.
    """

    spec: Spec
    element: str
    dtype: np.dtype
    blackwell: bool
    largest: tuple[float, ...] = ()

    @classmethod
    def of(cls, config) -> Encoder:
        """The encoder of a configuration."""
        element = get_format(config.format).element.name.lower()
        return cls(config.spec, element, config.dtype, config.arch.startswith("sm_10"))

    @property
    def per_word(self) -> int:
        """Elements of the input in a word."""
        return 4 // self.dtype.itemsize

    @property
    def per_code_word(self) -> int:
        """Codes in a word."""
        return 32 // self.spec.bits

    @property
    def has_table(self) -> bool:
        return self.spec.kind == NEAREST_UE4M3

    # --- the maximum ------------------------------------------------------------------------------

    def state(self, word):
        """The state of one word of input."""
        magnitude = self._magnitude(word)
        return magnitude if self.spec.propagate else self._clear(magnitude, 1)

    def finite(self, word):
        """The state of one word of input, in which infinities count as zero, too."""
        return self._clear(self._magnitude(word), 0)

    def _magnitude(self, word):
        return word & (0x7FFFFFFF if self.per_word == 1 else 0x7FFF7FFF)

    def _clear(self, magnitude, first: int):
        """Zero for magnitudes from the ``first``-th after infinity on."""
        if self.per_word == 1:
            return _select(magnitude >= Uint32(FP32_INF + first), Uint32(0), magnitude)
        above = 0x8000 - _HALF_INF[self.dtype] - first  # carries into the sign bit of such a half
        found = (magnitude + (above << 16 | above)) & Uint32(0x80008000)
        return magnitude & ~(found - (found >> 15))

    def merge(self, a, b):
        return cutlass.max(a, b) if self.per_word == 1 else ptx.max_u16x2(a, b)

    def states(self, words: list):
        """The state of several words."""
        # blocks of eight bits along columns take the same words' magnitudes, which are then there
        if self.per_word == 2 and self.spec.propagate and self.spec.bits < 8:
            kind, found = "bf16" if self.dtype == BFLOAT16 else "f16", words[0]
            for word in words[1:]:
                found = ptx.absmax_pairs(found, word, kind)
            return self._magnitude(found)
        state = self.state(words[0])
        for word in words[1:]:
            state = self.merge(state, self.state(word))
        return state

    def amax(self, state):
        """fp32 bits of the largest magnitude in a state."""
        if self.per_word == 1:
            return state
        return self._bits(cutlass.max(state & 0xFFFF, state >> 16), 0)

    def amaxes(self, state) -> list:
        """fp32 bits of each magnitude in a state."""
        return [self._bits(state, i) for i in range(self.per_word)]

    def magnitudes(self, words: list) -> list:
        """fp32 magnitudes of the elements of words; under nonfinite="te" zero for a NaN."""
        found = [bits & 0x7FFFFFFF for bits in self._all_bits(words)]
        if not self.spec.propagate:
            found = [_select(bits > Uint32(FP32_INF), Uint32(0), bits) for bits in found]
        return [bits.bitcast(Float32) for bits in found]

    def _bits(self, word, i: int):
        """fp32 bits of element ``i`` of a word."""
        return element(word, i, self.dtype).bitcast(Uint32)

    # --- the scale --------------------------------------------------------------------------------

    @cute.jit
    def prepare(self, global_scale, table, threads: cutlass.Constexpr):
        """``encode_scale``, and ``table`` filled by all ``threads`` of a block, of UE4M3 scales."""
        value = global_scale.iterator.load()
        for i in range(cute.arch.thread_idx()[0], 128, threads):
            ptx.store_shared(table + i * 4, [self.table_entry(Uint32(i), value)], 4)
        return self.encode_scale(value)

    def encode_scale(self, global_scale):
        """What a maximum is multiplied with to become a UE4M3 scale: of ``largest`` a list."""
        one = _at_most_max(ptx.divide(Float32(1.0), global_scale))
        if self.largest:
            return [ptx.divide(one, Float32(float(np.float32(each)))) for each in self.largest]
        return ptx.divide(one, Uint32(self.spec.max_bits).bitcast(Float32))

    def table_entry(self, code, global_scale):
        """fp32 bits of 1 / (value of the UE4M3 ``code`` * global_scale), 0 for a product of 0."""
        product = ptx.e4m3_value(code) * global_scale
        inverse = _at_most_max(ptx.divide(Float32(1.0), product)).bitcast(Uint32)
        return _select(product.bitcast(Uint32) == Uint32(0), Uint32(0), inverse)

    def scale(self, amax, encode_scale=None, table=None):
        """The stored scale, and its reciprocal's fp32 bits, of a block with maximum ``amax``.

        ``encode_scale`` and ``table`` (shared memory, one entry a code) are for UE4M3.
        """
        spec, bad = self.spec, amax >= Uint32(FP32_INF)
        if spec.kind == POWER_OF_TWO:
            exponent = (amax + (0x7FFFFF - spec.limit)) >> 23  # + 1 where the mantissa is above
            byte = cutlass.max(exponent, Uint32(spec.max_exponent + spec.min_byte))
            byte = byte - spec.max_exponent
            code, reciprocal = byte << spec.shift, (Uint32(254) - byte) << 23
        elif spec.kind == NEAREST_FP32:
            quotient = ptx.divide(amax.bitcast(Float32), Uint32(spec.max_bits).bitcast(Float32))
            code = cutlass.max(quotient.bitcast(Uint32), Uint32(_MIN_NORMAL))
            reciprocal = ptx.divide(Float32(1.0), code.bitcast(Float32)).bitcast(Uint32)
        else:
            scaled = amax.bitcast(Float32) * encode_scale
            code = ptx.fp8_of_four([scaled] * 4, "e4m3") & 0x7F
            reciprocal = ptx.load_shared(table + code * 4, 4)[0]
        code = self._marked(code, bad)
        if spec.propagate:  # a NaN for a reciprocal makes every element one
            reciprocal = _select(bad, Uint32(FP32_NAN), reciprocal)
        return code, reciprocal

    def marked(self, code, amax):
        """The stored scale of a block with maximum ``amax``, which need be no number."""
        return self._marked(code, amax >= Uint32(FP32_INF))

    def _marked(self, code, bad):
        special = self.spec.scale_nan if self.spec.propagate else self.spec.scale_max
        return _select(bad, Uint32(special), code)

    # --- elements ---------------------------------------------------------------------------------

    def elements(
        self, words: list, amax: list, reciprocal: list, noise: list | None = None
    ) -> list:
        """Codes, packed into words, of words of input.

        ``amax`` and ``reciprocal`` are fp32 bits, one for each element; those of E2M1 elements in a
        word of codes are of one block. ``noise``: random bits, one for each element, that round
        stochastically.
        """
        signed = words if noise is None else None
        return self._codes(self._all_bits(words), amax, reciprocal, signed, noise)

    def elements_of_columns(
        self, rows: list, amax: list, reciprocal: list, noise: list | None = None
    ) -> list:
        """Codes, packed into words, of each column of ``rows``, which are words of input each.

        ``amax`` and ``reciprocal`` are one for each column, whose rows are of one block. ``noise``:
        of the elements of each row.
        """
        columns = list(zip(*map(self._all_bits, rows), strict=True))
        random = [None] * len(columns) if noise is None else zip(*noise, strict=True)
        return [
            self._codes(list(bits), [a] * len(bits), [r] * len(bits), None, noise)
            for bits, a, r, noise in zip(columns, amax, reciprocal, random, strict=True)
        ]

    def in_order(self, codes: list, order) -> list:
        """The codes of 16 elements, packed into words, in the order of the elements: the i-th code
        given was made of element i XOR ``order``. None: they are in order.
        """
        if order is None:
            return codes
        size, swapped = self.per_code_word, 16 // self.dtype.itemsize  # elements, at least
        if swapped < size:  # halves of a word
            turn = (order & swapped) * self.spec.bits
            codes = [code >> turn | code << turn for code in codes]
            swapped = size
        while swapped < 16:
            moved = (order & swapped) != Uint32(0)
            codes = [_select(moved, codes[i ^ swapped // size], c) for i, c in enumerate(codes)]
            swapped *= 2
        return codes

    def _all_bits(self, words: list) -> list:
        return [self._bits(word, i) for word in words for i in range(self.per_word)]

    def _codes(
        self,
        bits: list,
        amax: list,
        reciprocal: list,
        words: list | None = None,
        noise: list | None = None,
    ) -> list:
        """``words``: those that ``bits`` are of, if they follow each other there."""
        scaled = []
        for i in range(0, len(bits), 2):
            scaled += self._multiply(bits[i : i + 2], reciprocal[i : i + 2])
        if not self.spec.propagate:
            scaled = [self._te(*each) for each in zip(bits, scaled, amax, strict=True)]
        if words is None or not self.spec.propagate:  # te changes signs
            words = [each.bitcast(Uint32) for each in scaled]
        size, count = self.per_code_word, len(scaled) // self.per_code_word
        if noise is not None:
            starts = range(0, len(scaled), size)
            given = scaled, amax, noise
            return [self._stochastic(*(each[i : i + size] for each in given)) for i in starts]
        signed = len(words) // count
        return [
            self._pack(scaled[i * size :][:size], amax[i * size], words[i * signed :][:signed])
            for i in range(count)
        ]

    def _multiply(self, bits: list, reciprocal: list) -> list:
        values = [each.bitcast(Float32) for each in bits]
        factors = [each.bitcast(Float32) for each in reciprocal]
        if self.blackwell and reciprocal[0] is reciprocal[1]:
            return ptx.multiply2(*values, factors[0])
        return [value * factor for value, factor in zip(values, factors, strict=True)]

    def _te(self, bits, scaled, amax):
        """In a block with an infinity: infinities and NaNs stay, all else becomes 0."""
        magnitude, inf = bits & 0x7FFFFFFF, Uint32(FP32_INF)
        special = _select(magnitude < inf, Uint32(0), bits)
        found = _select(amax == inf, special, scaled.bitcast(Uint32))
        # E2M1 has no NaN: its largest value, without the NaN's sign
        nan = FP32_INF if self.element == "e2m1" else FP32_NAN
        return _select(magnitude > inf, Uint32(nan), found).bitcast(Float32)

    def _pack(self, values: list, amax, signed: list):
        """A word of codes. ``signed``: words that have the signs of ``values``."""
        if self.element != "e2m1":
            return ptx.fp8_of_four(values, self.element)
        if self.blackwell:
            word = ptx.e2m1_of_eight(values)
        else:
            word = e2m1_of_eight(values, signed)
        return self._of_block(word, amax)

    def _stochastic(self, values: list, amax: list, noise: list):
        """A word of codes, rounded stochastically."""
        spec = self.spec
        if self.element == "e2m1" or all(each is amax[0] for each in amax):  # of one block
            word = stochastic_codes(values, noise, spec, nans=not spec.propagate)
            return self._of_block(word, amax[0])
        if spec.propagate:  # products have NaNs of any sign
            inf, nan = Uint32(FP32_INF), Uint32(FP32_NAN)
            pairs = zip(values, amax, strict=True)
            bits = [_select(each >= inf, nan, value.bitcast(Uint32)) for value, each in pairs]
            values = [each.bitcast(Float32) for each in bits]
        return stochastic_codes(values, noise, spec, nans=True)

    def _of_block(self, word, amax):
        """A word of codes of a block; where that is NaN those of NaN, or zero if only the scale can
        say so."""
        if self.spec.propagate:
            nans = sum(self.spec.block_nan_code << i for i in range(0, 32, self.spec.bits))
            word = _select(amax >= Uint32(FP32_INF), Uint32(nans), word)
        return word


def _select(condition, a, b):
    return Uint32(cutlass.select_(condition, a, b))


def _at_most_max(value):
    """A positive value, infinity replaced by the largest finite one."""
    return cutlass.min(value.bitcast(Uint32), Uint32(FP32_MAX)).bitcast(Float32)
