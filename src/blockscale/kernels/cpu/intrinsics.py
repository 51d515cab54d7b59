# mypy: ignore-errors
"""Instructions that numba has no function for, written in LLVM."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _binary(name, result, left, right):
    def typed(context, a, b):
        return result(left, right), lambda _, builder, __, args: getattr(builder, name)(*args)

    return intrinsic(typed)


def _bitcast(result, given, llvm):
    def typed(context, v):
        return result(given), lambda _, builder, __, args: builder.bitcast(args[0], llvm)

    return intrinsic(typed)


shl = _binary("shl", types.int32, types.int32, types.int32)
shr = _binary("lshr", types.int32, types.int32, types.int32)
as_float = _bitcast(types.float32, types.int32, ir.FloatType())
as_bits = _bitcast(types.int32, types.float32, ir.IntType(32))


@intrinsic
def fma(context, a, b, c):
    """``a * b + c`` of fp32, rounded once."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


def _vector_pointer(context, builder, array_type, array, index, lanes):
    """Pointer to items of a contiguous array, as a vector, and the vector's type."""
    pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    vector = ir.VectorType(context.get_data_type(array_type.dtype), lanes)
    return builder.bitcast(pointer, vector.as_pointer()), vector


def _amax(lanes):
    """Largest magnitude of so many items (integers of 16 or 32 bits, sign on top) from an index."""

    def typed(context, array, index):
        def generate(context, builder, signature, args):
            pointer, vector = _vector_pointer(context, builder, array, *args, lanes)
            bits = vector.element.width
            value = builder.load(pointer, align=bits // 8, typ=vector)
            value = builder.and_(value, ir.Constant(vector, [(1 << (bits - 1)) - 1] * lanes))
            name = f"llvm.vector.reduce.umax.v{lanes}i{bits}"
            kind = ir.FunctionType(vector.element, [vector])
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])

        return array.dtype(array, types.intp), generate

    return intrinsic(typed)


amax16, amax32 = _amax(16), _amax(32)


@intrinsic
def fill16(context, array, index, value):
    """Store ``value`` in 16 items."""

    def generate(context, builder, signature, args):
        pointer, vector = _vector_pointer(context, builder, array, *args[:2], 16)
        filled = ir.Constant(vector, ir.Undefined)
        for lane in range(16):
            filled = builder.insert_element(filled, args[2], ir.Constant(ir.IntType(32), lane))
        builder.store(filled, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


@intrinsic
def transpose16(context, source, start, stride, out, to, out_stride):
    """Transpose 16 x 16 bytes: four perfect shuffles of its rows."""

    def generate(context, builder, signature, args):
        def row(array_type, array, start, stride, i):
            index = builder.add(start, builder.mul(stride, ir.Constant(stride.type, i)))
            return _vector_pointer(context, builder, array_type, array, index, 16)

        def interleave(a, b, first):
            lanes = [first + i // 2 + 16 * (i % 2) for i in range(16)]
            return builder.shuffle_vector(
                a, b, ir.Constant(ir.VectorType(ir.IntType(32), 16), lanes)
            )

        given = [row(source, *args[:3], i) for i in range(16)]
        rows = [builder.load(pointer, align=1, typ=vector) for pointer, vector in given]
        for _ in range(4):
            pairs = zip(rows[:8], rows[8:], strict=True)
            rows = [interleave(a, b, first) for a, b in pairs for first in (0, 8)]
        for i in range(16):
            builder.store(rows[i], row(out, *args[3:], i)[0], align=1)
        return context.get_dummy_value()

    index = types.intp
    return types.void(source, index, index, out, index, index), generate


def _halved(builder, total):
    """Add the upper half of a vector to the lower one until a number is left."""
    half = total.type.count // 2
    while half:
        low, high = (
            ir.Constant(ir.VectorType(ir.IntType(32), half), list(range(i, i + half)))
            for i in (0, half)
        )
        total = builder.fadd(*(builder.shuffle_vector(total, total, each) for each in (low, high)))
        half //= 2
    return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))


@intrinsic
def squares(context, array, n):
    """Sum of squares in fp64 of ``n`` fp32 numbers (as int32), a multiple of 16 of them.

    There are 16 partial sums, of every 16th number each, in order; then upper halves of them are
    added to lower ones until one is left.
    """

    def generate(context, builder, signature, args):
        given, lanes = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.DoubleType(), 16)
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, [0.0] * 16))
        step = ir.Constant(args[1].type, 16)
        with cgutils.for_range(builder, builder.sdiv(args[1], step)) as loop:
            at = builder.mul(loop.index, step)
            pointer, _ = _vector_pointer(context, builder, array, args[0], at, 16)
            pointer = builder.bitcast(pointer, given.as_pointer())
            wide = builder.fpext(builder.load(pointer, align=4, typ=given), lanes)
            square = builder.fmul(wide, wide)
            builder.store(builder.fadd(builder.load(total), square), total)
        return _halved(builder, builder.load(total))

    return types.float64(array, types.intp), generate


@intrinsic
def dot32(context, x, start, line, n):
    """Sum of products in fp32 of ``x`` from ``start`` on and ``line`` (as int32), ``n`` of each.

    ``n`` is a multiple of 32. There are 32 partial sums, of every 32nd product each, in order; then
    upper halves of them are added to lower ones until one is left. Nothing is fused.
    """

    def generate(context, builder, signature, args):
        lanes = ir.VectorType(ir.FloatType(), 32)
        total = cgutils.alloca_once_value(builder, ir.Constant(lanes, [0.0] * 32))
        step = ir.Constant(args[3].type, 32)
        with cgutils.for_range(builder, builder.sdiv(args[3], step)) as loop:
            at = builder.mul(loop.index, step)
            numbers = []
            left, right = (x, args[0], builder.add(args[1], at)), (line, args[2], at)
            for each in (left, right):
                pointer, _ = _vector_pointer(context, builder, *each, 32)
                pointer = builder.bitcast(pointer, lanes.as_pointer())
                numbers.append(builder.load(pointer, align=4, typ=lanes))
            builder.store(builder.fadd(builder.load(total), builder.fmul(*numbers)), total)
        return _halved(builder, builder.load(total))

    return types.float32(x, types.intp, line, types.intp), generate


class _BFloat(ir.Type):
    """What llvmlite has no type for."""

    intrinsic_name = "bf16"

    def _to_string(self):
        return "bfloat"

    def __str__(self):
        return "bfloat"


# Rows and columns of a tile of sums: 24 of 32 registers, which keeps two instructions a cycle busy.
ROWS, TILE = 12, 32


@intrinsic
def dot_tile(context, a, row_step, pair_step, b, pairs, out):
    """Sums of products of ``ROWS`` rows of ``a`` by a panel of ``TILE`` rows of ``b``, to ``out``.

    ``a`` and ``b`` (int32) hold pairs of bfloat16; those of the panel lie side by side. Each sum is
    one of AVX512_BF16's VDPBF16PS, pair by pair: fp32, subnormal operands and sums are zero.
    """
    lanes = 16

    def generate(context, builder, signature, args):
        index, bits = args[1].type, ir.IntType(32)
        sums, words = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(bits, lanes)
        halves = ir.VectorType(_BFloat(), 2 * lanes)
        dot = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(sums, [sums, halves, halves]),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )

        def pointer(array_type, array, *at):
            base = context.make_array(array_type)(context, builder, array).data
            for step in at:
                base = builder.gep(base, [step])
            return base

        def number(i):
            return ir.Constant(index, i)

        zero = ir.Constant(sums, [0.0] * lanes)
        vectors = range(TILE // lanes)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in vectors] for _ in range(ROWS)]
        rows = [pointer(a, args[0], builder.mul(args[1], number(i))) for i in range(ROWS)]
        panel = pointer(b, args[3])
        nothing, first = ir.Constant(words, ir.Undefined), ir.Constant(bits, 0)
        with cgutils.for_range(builder, args[4]) as loop:
            right = []
            for j in vectors:
                at = builder.add(builder.mul(loop.index, number(TILE)), number(j * lanes))
                place = builder.bitcast(builder.gep(panel, [at]), words.as_pointer())
                right.append(builder.bitcast(builder.load(place, align=4, typ=words), halves))
            step = builder.mul(loop.index, args[2])
            for row, of_row in zip(rows, totals, strict=True):
                pair = builder.load(builder.gep(row, [step]))
                one = builder.insert_element(nothing, pair, first)
                every = ir.Constant(words, [0] * lanes)
                left = builder.bitcast(builder.shuffle_vector(one, nothing, every), halves)
                for total, each in zip(of_row, right, strict=True):
                    builder.store(builder.call(dot, [builder.load(total), left, each]), total)
        for i, of_row in enumerate(totals):
            for j, total in enumerate(of_row):
                place = pointer(out, args[5], number(i * TILE + j * lanes))
                builder.store(
                    builder.load(total), builder.bitcast(place, sums.as_pointer()), align=4
                )
        return context.get_dummy_value()

    i = types.intp
    return types.void(a, i, i, b, i, out), generate
