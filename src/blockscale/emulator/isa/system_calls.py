"""Functions that the driver's runtime gives to kernels: vprintf, malloc, free and __assertfail;
trap and brkpt.

CUDA C++ Programming Guide, "Formatted Output" and "Assertion"; PTX ISA 9.7.19 (brkpt, trap).
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..machine.state import Fragment, Step
from ..memory.buffers import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW, MemoryFault
from ..memory.heap import Heap
from ..ptx.program import PtxError
from .registry import Form, instruction

__all__ = ["KernelStopped", "system_call"]

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?"
    r"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXeEfFgGaAcsp%])"
)
_LENGTHS = (None, "h", "l", "ll")  # an H100 prints nonsense from any other of C's on, and from .*


class KernelStopped(PtxError):
    """The kernel ended itself: a failed assertion, trap or brkpt."""


def _place(w: Fragment, thread: int) -> str:
    x, y, z = (int(axis[thread]) for axis in w.cta.tid)
    return f"thread ({x}, {y}, {z}) of {w.cta}"


@instruction("trap", "brkpt", control=True)
def stop(form: Form) -> Step:
    """9.7.19: nobody debugs here, so that a breakpoint ends the kernel, too."""
    name = form.ins.opcode

    def run(w: Fragment) -> None:
        raise KernelStopped(
            f"{name}: the kernel executed {name}, first {_place(w, int(w.threads[0]))}",
            form.ins.line,
        )

    return run


# --- memory, as one thread sees it ----------------------------------------------------------------


def _from(w: Fragment, thread: int, address: int) -> np.ndarray:
    """The bytes from a generic address on, as far as the memory there goes."""
    window, offset = address >> 56 << 56, address & (1 << 56) - 1
    if window == LOCAL_WINDOW:
        found: np.ndarray = w.cta.local[thread, offset:]
        return found
    if window == SHARED_WINDOW:
        cta, start = w.cta.cluster.shared(offset, 1)
        assert start == offset & (1 << RANK_SHIFT) - 1
        return cta.shared[start:]
    buffer = w.cta.launch.memory.find(address)
    return buffer.data[address - buffer.base :]


def _string(w: Fragment, thread: int, address: int) -> str:
    data = _from(w, thread, address)
    ends = np.nonzero(data == 0)[0]
    if not len(ends):
        raise MemoryFault(f"the string at {address:#x} does not end")
    return data[: int(ends[0])].tobytes().decode(errors="replace")


# --- printf ---------------------------------------------------------------------------------------


class _Arguments:
    """The buffer of the arguments, each at a multiple of its size."""

    def __init__(self, w: Fragment, thread: int, address: int) -> None:
        self.w, self.thread, self.address, self.count = w, thread, address, 0

    def take(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.address += -self.address % size
        data = _from(self.w, self.thread, self.address)[:size]
        if len(data) < size:
            raise MemoryFault(f"argument {self.count + 1} of printf is out of bounds")
        self.address += size
        self.count += 1
        return struct.unpack("<" + code, data.tobytes())[0]


def _formatted(given: str, arguments: _Arguments) -> str:
    def one(match: re.Match[str]) -> str:
        kind, precision, length = match["kind"], match["precision"], match["length"]
        if kind == "%":
            return "%"
        if length not in _LENGTHS or precision == "*":
            raise PtxError(
                f"printf: {match[0]}: CUDA's printf knows the sizes h, l and ll, and no .*; of "
                "others a GPU prints nonsense: cast the argument, as to long long for %lld"
            )
        width = str(arguments.take("i")) if match["width"] == "*" else match["width"]
        spec = "%" + match["flags"] + width + (f".{precision}" if precision is not None else "")
        if kind == "s":
            address = arguments.take("Q")
            text = _string(arguments.w, arguments.thread, address) if address else "(null)"
            return (spec + "s") % text
        if kind == "p":
            return (spec + "s") % hex(arguments.take("Q"))
        if kind == "c":
            return (spec + "s") % chr(arguments.take("i") & 0xFF)
        if kind in "aA":
            value = re.sub(r"\.?0*p", "p", arguments.take("d").hex())
            return (spec + "s") % (value.upper() if kind == "A" else value)
        if kind in "eEfFgG":
            return (spec + kind) % arguments.take("d")
        long = length in ("l", "ll")
        value = arguments.take(("iq" if kind in "di" else "IQ")[long])
        if length == "h":  # an int is passed, its low bits are meant
            value = (value & 0xFFFF ^ 0x8000) - 0x8000 if kind in "di" else value & 0xFFFF
        return _integer(value, match["flags"], int(width or 0), precision, kind)

    return _CONVERSION.sub(one, given)


def _integer(value: int, flags: str, width: int, precision: str | None, kind: str) -> str:
    """As C writes it, whose # and + differ from Python's."""
    digits = format(abs(value), {"o": "o", "x": "x", "X": "X"}.get(kind, "d"))
    if precision is not None:
        digits = digits.zfill(int(precision or 0)) if value or int(precision or 0) else ""
    before = ""
    if kind in "di":  # what has no sign is given none
        before = "-" if value < 0 else "+" if "+" in flags else " " if " " in flags else ""
    elif "#" in flags and kind == "o":
        digits = digits if digits.startswith("0") else "0" + digits
    elif "#" in flags and kind in "xX" and value:
        before = "0" + kind
    if "-" in flags or width < 0:
        return (before + digits).ljust(abs(width))
    if "0" in flags and precision is None:
        digits = digits.zfill(width - len(before))
    return (before + digits).rjust(width)


def _vprintf(w: Fragment, thread: int, form: int, arguments: int) -> int:
    """Print for one thread; the number of arguments, -1 without a format."""
    if not form:
        return -1
    given = _Arguments(w, thread, arguments)
    sys.stdout.write(_formatted(_string(w, thread, form), given))
    return given.count


def _assertfail(
    w: Fragment, thread: int, message: int, file: int, line: int, function: int, _: int
) -> int:
    text, path, name = (
        _string(w, thread, address) if address else "?" for address in (message, file, function)
    )
    raise KernelStopped(
        f"{path}:{line}: {name}: {_place(w, thread)}: assertion `{text}` failed", None
    )


# --- malloc ---------------------------------------------------------------------------------------


def _heap(w: Fragment) -> Heap:
    launch = w.cta.launch
    if launch.peers is not None:
        raise PtxError("malloc: the processes of a launch have no heap in common: give workers=1")
    assert launch.heap is not None
    return launch.heap


def _malloc(w: Fragment, thread: int, size: int) -> int:
    return _heap(w).allocate(size, _place(w, thread))


def _free(w: Fragment, thread: int, address: int) -> int:
    launch = w.cta.launch
    try:
        size = _heap(w).free(address, _place(w, thread))
    except MemoryFault as fault:
        launch.alarms.tell("bounds", fault, w.site())
        return 0
    if size and launch.races is not None:
        launch.races.free(w.part(w.threads == thread, w.pc), address, size)
    return 0


#: Name -> bytes of the parameters, bytes of the result, what one thread does.
_CALLS: Mapping[str, tuple[tuple[int, ...], int, Callable[..., int]]] = {
    "vprintf": ((8, 8), 4, _vprintf),
    "malloc": ((8,), 8, _malloc),
    "free": ((8,), 0, _free),
    "__assertfail": ((8, 8, 4, 8, 8), 0, _assertfail),
}


def system_call(
    form: Form, name: str, arguments: tuple[str, ...], results: tuple[str, ...]
) -> Step | None:
    """The step of a call of such a function, None where ``name`` is none of them."""
    if name not in _CALLS:
        return None
    sizes, result, function = _CALLS[name]
    if (len(arguments), len(results)) != (len(sizes), int(result > 0)):
        raise form.error(f"{name} takes {len(sizes)} arguments and gives {int(result > 0)} results")

    def run(w: Fragment) -> None:
        given = [w.frame.variable(argument) for argument in arguments]
        if tuple(value.shape[1] for value in given) != sizes:
            raise form.error(f"{name} takes arguments of {sizes} bytes")
        for thread in w.threads.tolist():
            values = [int.from_bytes(value[thread].tobytes(), "little") for value in given]
            done = function(w, thread, *values)
            if result:
                back = (done & (1 << 8 * result) - 1).to_bytes(result, "little")
                w.frame.variable(results[0])[thread] = np.frombuffer(back, np.uint8)

    return run
