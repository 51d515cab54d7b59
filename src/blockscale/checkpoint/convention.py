"""How a ScaledTensor lies in a safetensors file: the names of its parts, and their description.

======================  ==========================  ==========================================
stored tensor           dtype                       content
======================  ==========================  ==========================================
``<name>``              F8_E4M3, F8_E5M2, or U8     elements; FP6 and FP4 packed into bytes
``<name>_scale``        U8 (E8M0), F8_E4M3, or F32  compact block scales; they multiply
``<name>_scale_2``      F32, no dimensions          NVFP4's global scale; it multiplies
``…input_scale``        F32, no dimensions          NVFP4's global scale of the activations
``<name>_offsets``      I32                         ends of groups, for grouped tensors
======================  ==========================  ==========================================

These are the names, types and meaning of NVIDIA ModelOpt's checkpoints (and, but for FP4 and FP6,
those of compressed-tensors), which vLLM, SGLang and TensorRT-LLM read. compressed-tensors calls
NVFP4's parts ``<name>_packed`` and ``<name>_global_scale``, and the latter *divides*: our
multiplier under that name would be read upside down. E8M0 is U8 in both, and readers that do not
know F8_E8M0 are still about.

``input_scale`` stands where ModelOpt has it: ``q_proj.weight`` has ``q_proj.input_scale``. Servers
read it for products of NVFP4 activations; vLLM takes uninitialized memory where it is missing. Only
a run of the model on data could tell the right one, so it is :data:`INPUT_SCALE`.

The header's ``__metadata__`` has a key ``blockscale``: JSON that says for each tensor what its
parts mean (:func:`describe`). A column-major tensor, like the ``.mT`` of a weight, is stored as its
transpose, with ``"transposed": true``: its bytes stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, formats
from ..stored import is_per_matrix
from ..tensor import ScaledTensor
from ..tensor_checks import VALUE_DTYPES
from .header import TORCH_DTYPES, Header, parse_json, show

__all__ = [
    "INPUT_SCALE",
    "SUFFIXES",
    "all_part_names",
    "assemble",
    "check_names",
    "describe",
    "description_of",
    "dtype_name",
    "input_scale_name",
    "metadata_for",
    "part_names",
    "parts_of",
    "read_descriptions",
]

KEY = "blockscale"
VERSION = 1

#: Part of a ScaledTensor -> what its name in the file ends with.
SUFFIXES = {"data": "", "scale": "_scale", "global_scale": "_scale_2", "offsets": "_offsets"}

#: NVFP4's global scale of activations where nothing calibrated it. With 1, blocks up to 2688
#: (448 * 6) are held, those above 0.094 (6 / 64) at full precision; below that, scales of blocks
#: are subnormal, and blocks below 0.006 become 0.
INPUT_SCALE = 1.0

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ORIGINALS = {str(d).removeprefix("torch."): d for d in VALUE_DTYPES}


def input_scale_name(name: str) -> str:
    """``q_proj.weight`` -> ``q_proj.input_scale``; ``experts`` -> ``experts_input_scale``."""
    stem, dot, last = name.rpartition(".")
    return f"{stem}{dot}input_scale" if last == "weight" else f"{name}_input_scale"


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype in a file. TypeError where a file has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"{dtype} cannot be stored in a safetensors file; cast it first") from None


def parts_of(
    format: Format, shape: Sequence[int], axis: int = -1, groups: int = 0
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Stored dtype and shape of data and scales of a tensor quantized along ``axis``.

    ``groups`` is their number where they cut the contraction. Matrices of a batch may have global
    scales of their own: ``shape[:-2]``, then.
    """
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "data": (format.element.dtype, format.data_shape(shape, axis, groups, axis == -1)),
        "scale": (_as_stored(format.scale.dtype), format.scale_shape(shape, axis, groups)),
    }
    if format.has_global_scale:
        parts["global_scale"] = parts["input_scale"] = torch.float32, ()
    return {part: (dtype_name(dtype), size) for part, (dtype, size) in parts.items()}


def _as_stored(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.float8_e8m0fnu else dtype


def description_of(format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """What :func:`describe` says of a tensor quantized along its last axis."""
    return {
        "format": format.name,
        "axis": -1,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": "compact",
        **({"input_scale": True} if format.has_global_scale else {}),
    }


def describe(q: ScaledTensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and stored parts of ``q``, its scales made compact."""
    q = q.to_layout("compact")
    extra: dict[str, Any] = {}
    if q.offsets is not None:
        extra["groups"] = "contraction" if q.k_grouped else "rows"
    if q.k_grouped:  # the contraction is last exactly where groups are apart
        turned = (q.axis == -1) != q.groups_apart
    else:
        turned = q.offsets is None and not q.qdata.is_contiguous() and q.qdata.mT.is_contiguous()
    if turned:
        q, extra["transposed"] = q.mT, True
    scalar = q.global_scale
    if scalar is not None and not is_per_matrix(scalar, q.shape):
        scalar = scalar.reshape(())
    parts = {
        "data": q.qdata,
        "scale": q.scale.contiguous().view(_as_stored(q.scale.dtype)),
        "global_scale": scalar,
        "offsets": q.offsets,
    }
    description = {**description_of(q.format, tuple(q.shape), q.dtype), "axis": q.axis, **extra}
    if q.axis != -1 or q.offsets is not None:  # no weight that a server reads
        description.pop("input_scale", None)
    if "input_scale" in description:
        parts["input_scale"] = torch.tensor(INPUT_SCALE, dtype=torch.float32)
    return description, {part: t.contiguous() for part, t in parts.items() if t is not None}


def part_names(name: str, description: Mapping[str, Any]) -> dict[str, str]:
    """Part -> its name in the file, for the parts that such a tensor has."""
    parts = ["data", "scale"]
    if formats[description["format"]].has_global_scale:
        parts.append("global_scale")
    if "groups" in description:
        parts.append("offsets")
    names = {part: name + SUFFIXES[part] for part in parts}
    if description.get("input_scale"):
        names["input_scale"] = input_scale_name(name)
    return names


def assemble(
    name: str, description: Mapping[str, Any], read: Callable[[str], Tensor]
) -> ScaledTensor:
    """The inverse of :func:`describe`; ``read`` returns a stored tensor by its name.

    Raises ValueError where parts and description do not fit.
    """
    format = formats[description["format"]]
    names = part_names(name, description)
    names.pop("input_scale", None)  # of other tensors: those that it is multiplied with
    parts = {part: read(stored) for part, stored in names.items()}
    if format.scale.dtype == torch.float8_e8m0fnu and parts["scale"].dtype == torch.uint8:
        parts["scale"] = parts["scale"].view(format.scale.dtype)
    try:
        q = ScaledTensor(
            **parts,  # type: ignore[arg-type]
            format=format,
            shape=description["shape"],
            axis=description["axis"],
            dtype=_ORIGINALS[description["dtype"]],
            k_grouped=description.get("groups") == "contraction",
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{show(name)} is not what the file says of it: {error}") from None
    return q.mT if description.get("transposed") else q


def metadata_for(
    descriptions: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]
) -> dict[str, str]:
    """``metadata`` with the descriptions in it."""
    if not descriptions:
        return dict(metadata)
    content = {"version": VERSION, "tensors": descriptions}
    return {**metadata, KEY: json.dumps(content, separators=(",", ":"), sort_keys=True)}


def read_descriptions(header: Header) -> dict[str, dict[str, Any]]:
    """Descriptions of a file's quantized tensors, checked; empty where it has none.

    Raises ValueError where they are damaged, of a later version, or name tensors that are missing.
    """
    text = header.metadata.get(KEY)
    if text is None:
        return {}
    try:
        content = parse_json(text)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}, which this blockscale reads")
        tensors = content.get("tensors")
        if not isinstance(tensors, dict):
            raise ValueError("it has no tensors")
        for name, description in tensors.items():
            _check(name, description, header)
        return tensors
    except ValueError as error:
        raise ValueError(f"the metadata {KEY!r} is damaged: {error}") from None


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "format": lambda v: isinstance(v, str) and v in formats,
    "axis": lambda v: type(v) is int and v in (-1, -2),
    "shape": lambda v: isinstance(v, list) and all(type(n) is int and 0 <= n < 2**63 for n in v),
    "dtype": lambda v: isinstance(v, str) and v in _ORIGINALS,
    "layout": lambda v: v == "compact",
    "transposed": lambda v: v in (None, True),
    "input_scale": lambda v: v in (None, True),
    "groups": lambda v: v in (None, "rows", "contraction"),
}


def _check(name: str, description: Any, header: Header) -> None:
    if not isinstance(description, dict):
        raise ValueError(f"{show(name)} is not described by an object")
    wrong = [key for key, fits in _FIELDS.items() if not fits(description.get(key))]
    if wrong:
        raise ValueError(f"{wrong[0]} of {show(name)}: got {description.get(wrong[0])!r:.80}")
    if len(description["shape"]) < -description["axis"]:
        raise ValueError(f"axis of {show(name)}: got {description['axis']} for its shape")
    names, groups = part_names(name, description), 0
    for stored_name in names.values():
        if stored_name not in header.tensors:
            raise ValueError(f"{show(name)} needs {show(stored_name)}, which is not there")
    if description.get("groups") == "contraction":
        groups = header.tensors[names["offsets"]].numel
    format, shape, axis = formats[description["format"]], description["shape"], description["axis"]
    for part, (dtype, size) in parts_of(format, shape, axis, groups).items():
        if part not in names:  # input_scale, in files of before
            continue
        stored = header.tensors[names[part]]
        sizes = {size, tuple(shape[:-2])} if part == "global_scale" else {size}
        if stored.dtype != dtype or stored.shape not in sizes:
            raise ValueError(
                f"{show(names[part])} is {stored.dtype} {list(stored.shape)}; {format.name} of "
                f"{shape} along axis {axis} has {dtype} "
                f"{' or '.join(str(list(each)) for each in sorted(sizes))} there"
            )


def all_part_names(descriptions: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Names of every stored tensor that belongs to a quantized one."""
    return {part for name, d in descriptions.items() for part in part_names(name, d).values()}


def check_names(names: Iterable[str], argument: str) -> None:
    """ValueError where two tensors would be stored under one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"{argument}: two tensors would be stored as {show(name)} (a quantized tensor "
                f"takes its name with {', '.join(filter(None, SUFFIXES.values()))} too, and "
                "input_scale); rename one, or leave the quantized one out"
            )
        seen.add(name)
