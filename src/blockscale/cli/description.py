"""The description of a launch that ``blockscale emulate`` reads: JSON, and arrays beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from ..emulator.ptx.program import Module

__all__ = ["Case", "read_case"]

_T = TypeVar("_T")

_KEYS = ("target", "entry", "grid", "block", "cluster", "shared", "args", "outputs", "expected")
_CODES = {"u": "u", "b": "u", "s": "i", "f": "f"}
_SCALARS = {
    f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
    for kind, code in _CODES.items()
    for bits in (8, 16, 32, 64)
    if kind != "f" or bits > 8
}
_ALIGNMENT = 256  # of an allocation on a GPU


@dataclass(frozen=True)
class Case:
    """A launch, ready to be made.

    Attributes:
        grid, block, cluster, shared, args: what Device.launch takes.
        arrays: by name, those of the data and those made here; the kernel writes into them.
        buffers: those that no argument of its own shows: what structures point to.
        outputs: names of arrays to show.
        expected: output -> what it should be.
    """

    target: str
    entry: str
    grid: Sequence[int]
    block: Sequence[int]
    cluster: Sequence[int] | None
    shared: int
    args: list[Any]
    arrays: dict[str, np.ndarray]
    buffers: list[tuple[str, np.ndarray]]
    outputs: list[str]
    expected: dict[str, np.ndarray]


def read_case(
    module: Module, description: Mapping[str, Any], data: Mapping[str, np.ndarray]
) -> Case:
    """Check a description; what it leaves out comes from the module where that says it.

    Args:
        module: the PTX, at least in outline.
        description: what the JSON file says, with the options of the command line.
        data: the arrays of the NPZ file.

    Raises ValueError naming the key.
    """
    _only(description, "the description", *_KEYS)
    entry = _given(description, "entry", str) or _only_entry(module)
    function = module.functions.get(entry)
    required = function.directives.get("reqntid") if function else (1,)  # the launch says no entry
    block = _dimensions(description, "block") or required
    if block is None:
        raise ValueError(f"block: {entry} does not require one; give --block")
    arrays: dict[str, np.ndarray] = {}
    args = [
        _argument(_object(spec, f"args[{i}]", _AN_ARGUMENT), f"args[{i}]", arrays, data)
        for i, spec in enumerate(_given(description, "args", list) or [])
    ]
    outputs = _given(description, "outputs", list)
    if outputs is None:
        outputs = [name for name in arrays if name not in data]
    for name in outputs:
        if not isinstance(name, str) or name not in arrays:
            raise ValueError(f"outputs: {name!r} is no argument; those are {_names(arrays)}")
    expected = {}
    for name, source in (_given(description, "expected", dict) or {}).items():
        if name not in outputs:
            raise ValueError(f"expected: {name!r} is no output; those are {_names(outputs)}")
        expected[name] = _of_data(data, source, f"expected[{name!r}]")
    return Case(
        _given(description, "target", str) or _target(module),
        entry,
        _dimensions(description, "grid") or [1],
        block,
        _dimensions(description, "cluster"),
        _given(description, "shared", int) or 0,
        args,
        arrays,
        [(n, a) for n, a in arrays.items() if not any(a is _memory(arg) for arg in args)],
        outputs,
        expected,
    )


def _memory(arg: Any) -> Any:
    return getattr(arg, "array", arg)


def _only_entry(module: Module) -> str:
    entries = [function.name for function in module.functions.values() if function.is_entry]
    if len(entries) != 1:
        raise ValueError(f"entry: the PTX has {_names(entries)}; choose one with --entry")
    return entries[0]


def _target(module: Module) -> str:
    """The device for which the PTX is, or the older one for what runs anywhere."""
    for family, device in (("sm_103", "sm_103a"), ("sm_10", "sm_100a")):
        if any(name.startswith(family) for name in module.target):
            return device
    return "sm_90a"


# --- arguments ------------------------------------------------------------------------------------


def _argument(
    spec: Mapping[str, Any],
    where: str,
    arrays: dict[str, np.ndarray],
    data: Mapping[str, np.ndarray],
) -> Any:
    """Makes the argument of the kernel that one entry of ``args`` describes."""
    kinds = [kind for kind in _KINDS if kind in spec]
    if len(kinds) != 1:
        raise ValueError(
            f"{where}: got {', '.join(spec) or 'nothing'}; expected one of {', '.join(_KINDS)}"
        )
    if kinds[0] in ("array", "zeros"):
        _only(spec, where, *_OF_ARRAYS)
        return _array(spec, where, arrays, data)
    if kinds[0] == "scalar":
        _only(spec, where, "scalar", "type")
        return _scalar(spec["scalar"], spec.get("type"), where)
    _only(spec, where, kinds[0])
    if kinds[0] == "bytes":
        try:
            return bytes.fromhex(spec["bytes"])
        except (TypeError, ValueError):
            raise ValueError(f"{where}: bytes are hexadecimal digits: {spec['bytes']!r}") from None
    if kinds[0] == "struct":
        return _struct(spec["struct"], where, arrays, data)
    return _tensor_map(_object(spec["tensor_map"], where, _A_MAP), where, arrays, data)


def _struct(
    parts: Any, where: str, arrays: dict[str, np.ndarray], data: Mapping[str, np.ndarray]
) -> bytes:
    """Pointers, typed numbers and bytes, one after the other."""
    if not isinstance(parts, list):
        raise ValueError(f"{where}: struct is a list: {parts!r}")
    out = b""
    for i, part in enumerate(parts):
        part = _object(part, f"{where}.struct[{i}]", _AN_ARGUMENT)
        value = _argument(part, where, arrays, data)
        if isinstance(value, np.ndarray):
            out += int(value.ctypes.data).to_bytes(8, "little")
        elif isinstance(value, bytes):
            out += value
        elif isinstance(value, np.generic):
            out += value.tobytes()
        else:
            raise ValueError(f"{where}.struct[{i}]: a number needs its type")
    return out


_KINDS = ("array", "zeros", "scalar", "bytes", "tensor_map", "struct")
_OF_ARRAYS = ("array", "zeros", "dtype", "name")


def _array(
    spec: Mapping[str, Any],
    where: str,
    arrays: dict[str, np.ndarray],
    data: Mapping[str, np.ndarray],
) -> np.ndarray:
    """The array that {"array": name} or {"zeros": shape, "dtype": ..., "name": ...} means.

    A name stands for the same array every time.
    """
    if "array" in spec:
        name = spec["array"]
        if not isinstance(name, str) or name not in arrays:
            arrays[name] = _aligned(_of_data(data, name, where))
        return arrays[name]
    name = _given(spec, "name", str) or where
    if name in arrays or name in data:
        raise ValueError(f"{where}: the name {name!r} is taken; use {{'array': {name!r}}}")
    shape = spec["zeros"] if isinstance(spec["zeros"], list) else [spec["zeros"]]
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"{where}: zeros is a shape: {spec['zeros']!r}")
    try:
        dtype = np.dtype(spec.get("dtype", "float32"))
    except TypeError:
        dtype = np.dtype(object)
    if dtype.isbuiltin != 1 or dtype.hasobject:  # those of ml_dtypes count only where it is loaded
        raise ValueError(
            f"{where}: numpy knows no dtype {spec['dtype']!r}; bits of such a type are uint8 or "
            "uint16"
        )
    arrays[name] = _aligned(np.zeros(shape, dtype))
    return arrays[name]


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address like those on a GPU."""
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    lead = -room.ctypes.data % _ALIGNMENT
    out = room[lead : lead + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def _scalar(value: Any, type: str | None, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: scalar is a number: {value!r}")
    if type is None:
        return value
    dtype = _SCALARS.get(type)
    if dtype is None:
        raise ValueError(f"{where}: type {type!r}; allowed are {', '.join(_SCALARS)}")
    if dtype.kind == "f":
        return dtype.type(value)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if type[0] == "b":
        low = -(int(high) + 1) // 2
    if isinstance(value, float) or not low <= value <= high:
        raise ValueError(f"{where}: {value} is no {type}")
    return np.array(value & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)[()]


def _tensor_map(
    spec: Mapping[str, Any],
    where: str,
    arrays: dict[str, np.ndarray],
    data: Mapping[str, np.ndarray],
) -> Any:
    """{"array": name, "box": [...], ...}: what TensorMap.of takes; or zeros, as for arrays.

    With a shape (innermost first), strides and element, the array is only where it begins.
    """
    from ..emulator import TensorMap

    own = {key: value for key, value in spec.items() if key in _OF_ARRAYS}
    if len({"array", "zeros"} & set(own)) != 1 or "box" not in spec:
        raise ValueError(f"{where}: tensor_map needs a box, and array or zeros")
    more = {key: value for key, value in spec.items() if key not in (*own, "box")}
    array = _array(own, where, arrays, data)
    try:
        if "shape" in more:
            return TensorMap(array.ctypes.data, box=spec["box"], array=array, **more)
        return TensorMap.of(array, spec["box"], **more)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


# --- checks ---------------------------------------------------------------------------------------


def _of_data(data: Mapping[str, np.ndarray], name: Any, where: str) -> np.ndarray:
    if not isinstance(name, str) or name not in data:
        raise ValueError(f"{where}: {name!r} is not in the data, which has {_names(data)}")
    return np.ascontiguousarray(data[name]).reshape(data[name].shape)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _only(spec: Mapping[str, Any], where: str, *allowed: str) -> None:
    if unknown := sorted(set(spec) - set(allowed)):
        raise ValueError(
            f"{where}: unknown key {', '.join(map(repr, unknown))}; allowed are "
            f"{', '.join(allowed)}"
        )


_AN_ARGUMENT = '{"array": "x"} or {"scalar": 1, "type": "u32"}'
_A_MAP = '{"array": "x", "box": [32, 8]}'


def _object(value: Any, where: str, example: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {value!r}; expected an object, such as {example}")
    return value


def _given(description: Mapping[str, Any], key: str, type: type[_T]) -> _T | None:
    value = description.get(key)
    if value is not None and not isinstance(value, type):
        raise ValueError(f"{key}: got {value!r}; expected {_JSON[type]}")
    return value


_JSON = {str: "text", int: "an integer", list: "a list", dict: "an object"}


def _dimensions(description: Mapping[str, Any], key: str) -> list[int] | None:
    value = description.get(key)
    if value is None:
        return None
    given = value if isinstance(value, list) else [value]
    if not 1 <= len(given) <= 3 or not all(isinstance(n, int) and n > 0 for n in given):
        raise ValueError(f"{key}: got {value!r}; expected one to three positive integers")
    return given
