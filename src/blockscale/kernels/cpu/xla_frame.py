# mypy: ignore-errors
"""XLA's calls of C functions, read by address: its typed FFI without a C++ compiler.

XLA hands :func:`answer` a frame, structs of words as ``xla/ffi/api/c_api.h`` has them: addresses of
operands, of results and of attributes. One attribute, an array of int64, is the plan of a call. The
last result is room: what threads share of a call, then scratch memory for each of them. A call is
spread over XLA's own threads, which run the task of the call's kind and take tiles one after
another; whoever ends last tells XLA. Nobody waits.
"""

from __future__ import annotations

import ctypes

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from ...jit import compiled, inlined, spliced
from .huge_pages import ADVICE, LEAST, PAGE, madvise

MOST_BUFFERS = 7  # operands, then results, without the room
# Words of a plan, of every kind of task, then how many bytes buffers have, then the kind's own.
KIND, TILES, CHUNK, THREADS, SCRATCH, SIZES = range(6)
OWN = SIZES + MOST_BUFFERS
# Words of the room that threads share, then addresses of buffers, then the plan.
_API, _FUTURE, _RUNNING, _NEXT, _JOINED, _AT_ONCE, _PLAN_SIZE, _BUFFERS = range(8)
_PLAN = _BUFFERS + MOST_BUFFERS
CACHE_LINE = 64

# Words of structs in c_api.h: of a frame (how many operands and results there are, two words on
# where their addresses lie), of a buffer, an attribute and an extension, of the functions.
_EXTENSION, _FRAME_API, _CONTEXT, _ARGS, _RETS, _ATTRS, _FRAME_FUTURE = 1, 2, 3, 7, 12, 20, 21
_BUFFER_ADDRESS, _ARRAY_SIZE, _ARRAY_ADDRESS, _METADATA = 3, 1, 2, 3
_VERSION, _ERROR_DESTROY, _SCHEDULE, _NUM_THREADS, _CREATE, _SET_AVAILABLE = 4, 8, 17, 18, 19, 20
_METADATA_TYPE = 1
_MAJOR, _MINOR = 0, 3  # of the header that this was written from

#: Addresses of tasks by kind, and last of madvise: compiled code, which may come from a file, finds
#: them by name.
functions = (ctypes.c_int64 * 16)()
if madvise is not None:
    functions[-1] = ctypes.cast(madvise, ctypes.c_void_p).value
_NAME = "blockscale_xla_functions"
llvmlite.binding.add_symbol(_NAME, ctypes.addressof(functions))


def room(plan: int, threads: int, scratch: int) -> int:
    """Bytes of room for so many words of a plan, and threads with so many bytes of scratch each."""
    return _shared(plan) + threads * scratch


def _shared(plan):
    return -(-8 * (_PLAN + plan) // CACHE_LINE) * CACHE_LINE


_shared_bytes = inlined(_shared)


@intrinsic
def view(context, address, nbytes, dtype):
    """Memory at an address as items of ``dtype``: numba lets no function return arrays without
    reference counts, but what is spliced into another."""
    array_type = types.Array(dtype.dtype, 1, "C")

    def generate(context, builder, signature, args):
        array = context.make_array(array_type)(context, builder)
        item = context.get_data_type(array_type.dtype)
        size = ir.Constant(args[1].type, context.get_abi_sizeof(item))
        count = builder.sdiv(args[1], size)
        populate_array(
            array,
            data=builder.inttoptr(args[0], item.as_pointer()),
            shape=[count],
            strides=[size],
            itemsize=size,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(types.intp, types.intp, dtype), generate


@intrinsic
def _functions(context):
    def generate(context, builder, signature, args):
        word = ir.IntType(64)
        found = builder.module.globals.get(_NAME) or ir.GlobalVariable(builder.module, word, _NAME)
        return builder.ptrtoint(found, word)

    return types.intp(), generate


@intrinsic
def _add(context, address, value):
    """Add to a word that threads share; what it was before."""

    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _ask(context, function, words):
    """Call one of XLA's functions with a struct of these words after its size and extensions.

    Returns the address of an error, or 0, and what the last word is then.
    """

    def generate(context, builder, signature, args):
        word, count = args[0].type, len(signature.args[1])
        struct = cgutils.alloca_once(builder, ir.ArrayType(word, 2 + count))
        given = [ir.Constant(word, 8 * (2 + count)), ir.Constant(word, 0)]
        given += cgutils.unpack_tuple(builder, args[1], count)
        places = [cgutils.gep_inbounds(builder, struct, 0, i) for i in range(2 + count)]
        for value, place in zip(given, places, strict=True):
            builder.store(value, place)
        kind = ir.FunctionType(word, [word])
        called = builder.inttoptr(args[0], kind.as_pointer())
        error = builder.call(called, [builder.ptrtoint(struct, word)])
        return context.make_tuple(builder, signature.return_type, [error, builder.load(places[-1])])

    return types.UniTuple(types.intp, 2)(types.intp, words), generate


@intrinsic
def _call(context, function, words):
    def generate(context, builder, signature, args):
        given = cgutils.unpack_tuple(builder, args[1], len(signature.args[1]))
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.intp, words), generate


@spliced
def _words(address, count):
    return view(address, 8 * count, np.int64)


@compiled
def _describe(extension, api):
    """Say which version of the FFI this is written for, or an older one that is there."""
    address = _words(extension, 4)[_METADATA]
    metadata, halves = _words(address, 5), view(address, 40, np.int32)
    metadata[1], metadata[2] = 24, 0
    halves[6], halves[7] = _MAJOR, min(_MINOR, view(api + 8 * _VERSION, 8, np.int32)[1])
    halves[8] = 0  # no traits


@compiled
def _threads(api, context, wanted, place):
    """How many threads to use of those wanted; ``place``: the address of a word to write to."""
    if wanted < 2:
        return 1
    _words(place, 1)[0] = 1
    error, _ = _ask(api[_NUM_THREADS], (context, place))
    if error:
        _ask(api[_ERROR_DESTROY], (error,))
    return max(min(_words(place, 1)[0], wanted), 1)


@compiled
def _advise(address, nbytes):
    """As ``huge_pages.advise``."""
    madvise = _words(_functions(), 16)[15]
    if nbytes >= LEAST and madvise:
        start = -(-address // PAGE) * PAGE
        _call(madvise, (start, (address + nbytes - start) // PAGE * PAGE, ADVICE))


def answer(address):
    """What XLA calls with the address of a frame: 0 or the address of an error."""
    frame = _words(address, 22)
    extension = frame[_EXTENSION]
    if extension and view(extension + 8, 4, np.int32)[0] == _METADATA_TYPE:
        _describe(extension, frame[_FRAME_API])
        return 0
    attribute = _words(_words(frame[_ATTRS], 1)[0], 3)
    plan = _words(attribute[_ARRAY_ADDRESS], attribute[_ARRAY_SIZE])
    args, rets = _words(frame[_ARGS + 2], frame[_ARGS]), _words(frame[_RETS + 2], frame[_RETS])
    shared_address = _words(rets[rets.size - 1], 4)[_BUFFER_ADDRESS]
    shared = _words(shared_address, _PLAN + plan.size)
    for i in range(args.size):
        shared[_BUFFERS + i] = _words(args[i], 4)[_BUFFER_ADDRESS]
    for i in range(rets.size - 1):
        shared[_BUFFERS + args.size + i] = _words(rets[i], 4)[_BUFFER_ADDRESS]
        _advise(shared[_BUFFERS + args.size + i], plan[SIZES + args.size + i])
    for i in range(plan.size):
        shared[_PLAN + i] = plan[i]

    api, context = _words(frame[_FRAME_API], 21), frame[_CONTEXT]
    wanted = min(plan[THREADS], plan[TILES] // plan[CHUNK])
    threads = _threads(api, context, wanted, shared_address)
    shared[_API], shared[_FUTURE], shared[_RUNNING] = frame[_FRAME_API], 0, threads
    shared[_NEXT], shared[_JOINED], shared[_PLAN_SIZE] = 0, 0, plan.size
    # several each: one that is held up does fewer
    several = -(-plan[TILES] // (8 * threads)) if threads > 1 else plan[TILES]
    shared[_AT_ONCE] = max(plan[CHUNK], several)
    task = _words(_functions(), 16)[plan[KIND]]
    if threads > 1:
        error, future = _ask(api[_CREATE], (0,))
        if error:
            return error
        shared[_FUTURE] = frame[_FRAME_FUTURE] = future
        for _ in range(threads - 1):
            error, _ = _ask(api[_SCHEDULE], (context, task, shared_address))
            if error:  # this thread does it all
                _ask(api[_ERROR_DESTROY], (error,))
                _add(shared_address + 8 * _RUNNING, -1)
    _call(task, (shared_address,))
    return 0


@spliced
def plan_of(address):
    return _words(address + 8 * _PLAN, _words(address, _PLAN)[_PLAN_SIZE])


@spliced
def buffer(address, i, dtype):
    """Operand or result ``i`` of the call; results come after operands."""
    return view(_words(address, _PLAN)[_BUFFERS + i], plan_of(address)[SIZES + i], dtype)


@compiled
def join(address):
    """The address of this thread's scratch memory."""
    plan, slot = plan_of(address), _add(address + 8 * _JOINED, 1)
    return address + _shared_bytes(plan.size) + slot * plan[SCRATCH]


@compiled
def take(address):
    """The next tiles, from the first to before the last; none are left where these are one."""
    size, tiles = _words(address, _PLAN)[_AT_ONCE], plan_of(address)[TILES]
    first = min(_add(address + 8 * _NEXT, size), tiles)
    return first, min(first + size, tiles)


@compiled
def leave(address):
    """The last one to leave tells XLA, which may free the room."""
    shared = _words(address, _PLAN)
    api, future = shared[_API], shared[_FUTURE]
    if _add(address + 8 * _RUNNING, -1) == 1 and future:
        _ask(_words(api, 21)[_SET_AVAILABLE], (future,))
