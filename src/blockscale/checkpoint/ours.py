"""Our own convention: any ScaledTensor, described in the file's header.

======================  ==========================  ==========================================
stored tensor           dtype                       content
======================  ==========================  ==========================================
``<name>``              F8_E4M3, F8_E5M2, or U8     elements; FP6 and FP4 packed into bytes
``<name>_scale``        U8 (E8M0), F8_E4M3, or F32  compact block scales; they multiply
``<name>_scale_2``      F32, no dimensions          NVFP4's global scale; it multiplies
``...input_scale``      F32, no dimensions          NVFP4's global scale of the activations
``<name>_offsets``      I32                         ends of groups, for grouped tensors
======================  ==========================  ==========================================

These are the names, types and meaning of NVIDIA ModelOpt's checkpoints. E8M0 is U8, as others have
it: readers that do not know F8_E8M0 are still about.

The header's ``__metadata__`` has a key ``blockscale``: JSON that says for each tensor what its
parts mean (:func:`describe`). A column-major tensor, like the ``.mT`` of a weight, is stored as its
transpose, with ``"transposed": true``: its bytes stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import Format, formats
from ..stored import is_per_matrix
from ..tensor import ScaledTensor
from ..tensor_checks import VALUE_DTYPES
from .header import Header, Stored, parse_json, show
from .storage import Description, Place, Storage, dtype_name, unpadded

__all__ = ["INPUT_SCALE", "STORAGES", "describe", "metadata_for", "read_descriptions"]

KEY = "blockscale"
VERSION = 1

#: NVFP4's global scale of activations where nothing calibrated it. With 1, blocks up to 2688
#: (448 * 6) are held, those above 0.094 (6 / 64) at full precision; below that, scales of blocks
#: are subnormal, and blocks below 0.006 become 0.
INPUT_SCALE = 1.0

_ORIGINALS = {str(d).removeprefix("torch."): d for d in VALUE_DTYPES}


def _storage(format: Format) -> Storage:
    is_e8m0 = format.scale.dtype == torch.float8_e8m0fnu
    scale = "U8" if is_e8m0 else dtype_name(format.scale.dtype)
    return Storage(
        format,
        {
            "data": Place("{name}", (dtype_name(format.element.dtype),)),
            "scale": Place("{name}_scale", (scale,)),
            "global_scale": Place("{name}_scale_2", ("F32",)),
            "input_scale": Place("{layer}input_scale", ("F32",)),
            "offsets": Place("{name}_offsets", ("I32",)),
        },
    )


#: Of each format.
STORAGES: Mapping[str, Storage] = {name: _storage(format) for name, format in formats.items()}


def describe(
    q: ScaledTensor,
    storages: Mapping[str, Storage] = STORAGES,
    *,
    weight_only: bool = False,
    input_scale: float = INPUT_SCALE,
) -> tuple[Description, dict[str, Tensor]]:
    """Description and stored parts of ``q``, its scales made compact.

    ``storages``: of a convention. ``weight_only``: servers do not quantize its input.
    ``input_scale``: what they do that with, where the storage has a place for it. Raises ValueError
    where the convention has no such tensor.
    """
    q, groups = q.to_layout("compact"), ""
    if q.offsets is not None:
        groups = "contraction" if q.k_grouped else "rows"
    if q.k_grouped:  # the contraction is last exactly where groups are apart
        turned = (q.axis == -1) != q.groups_apart
    else:
        turned = q.offsets is None and not q.qdata.is_contiguous() and q.qdata.mT.is_contiguous()
    q = q.mT if turned else q
    storage, scalar = storages[q.format.name], q.global_scale
    own = storages is STORAGES
    if not own and (turned or groups or q.axis != storage.axis):
        raise ValueError(
            f"{q} has blocks along another dimension than files of this convention; choose "
            "convention 'blockscale'"
        )
    if scalar is not None and not is_per_matrix(scalar, q.shape):
        scalar = scalar.reshape(())
    # where it is a weight that a server reads
    serves = "input_scale" in storage.places and q.format.has_global_scale and not weight_only
    serves = serves and q.axis == storage.axis and not groups
    description = Description(storage, tuple(q.shape), q.dtype, q.axis, serves, turned, groups)
    data = q.qdata
    if not own:  # others do not pad
        data = data[..., : unpadded(q.format, tuple(q.shape), -1)[-1]]
    parts: dict[str, Tensor | None] = {
        "data": data,
        "scale": q.scale,
        "global_scale": scalar,
        "offsets": q.offsets,
        "input_scale": torch.tensor(input_scale, dtype=torch.float32) if serves else None,
    }
    return description, {
        part: place.encode(t.contiguous()).view(place.shapes.stored(tuple(t.shape)))
        for part, t in parts.items()
        if t is not None and (place := storage.places[part])
    }


def metadata_for(
    descriptions: Mapping[str, Description], metadata: Mapping[str, str]
) -> dict[str, str]:
    """``metadata`` with the descriptions in it."""
    if not descriptions:
        return dict(metadata)
    tensors = {name: _to_json(each) for name, each in descriptions.items()}
    content = {"version": VERSION, "tensors": tensors}
    return {**metadata, KEY: json.dumps(content, separators=(",", ":"), sort_keys=True)}


def _to_json(description: Description) -> dict[str, Any]:
    content = {
        "format": description.format.name,
        "axis": description.axis,
        "shape": list(description.shape),
        "dtype": str(description.dtype).removeprefix("torch."),
        "layout": "compact",
        "input_scale": description.has_input_scale,
        "transposed": description.transposed,
        "groups": description.groups,
    }
    return {key: value for key, value in content.items() if value not in (False, "")}


def read_descriptions(header: Header, tensors: Mapping[str, Stored]) -> dict[str, Description]:
    """Descriptions of a file's quantized tensors, checked; empty where it has none.

    ``tensors``: of all files that can be read: a header may describe those of others, too. Raises
    ValueError where they are damaged, of a later version, or name tensors that are missing.
    """
    text = header.metadata.get(KEY)
    if text is None:
        return {}
    try:
        content = parse_json(text)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}, which this blockscale reads")
        described = content.get("tensors")
        if not isinstance(described, dict):
            raise ValueError("it has no tensors")
        descriptions = {name: _from_json(name, each) for name, each in described.items()}
        for name, description in descriptions.items():
            if not any(stored in tensors for stored in description.names(name).values()):
                raise ValueError(
                    f"it describes {show(name)}, of which nothing is there; one file of several is "
                    "read where their index lies beside it"
                )
            description.check(name, tensors)
        return descriptions
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


def _from_json(name: str, content: Any) -> Description:
    if not isinstance(content, dict):
        raise ValueError(f"{show(name)} is not described by an object")
    wrong = [key for key, fits in _FIELDS.items() if not fits(content.get(key))]
    if wrong:
        raise ValueError(f"{wrong[0]} of {show(name)}: got {content.get(wrong[0])!r:.80}")
    if len(content["shape"]) < -content["axis"]:
        raise ValueError(f"axis of {show(name)}: got {content['axis']} for its shape")
    return Description(
        STORAGES[content["format"]],
        tuple(content["shape"]),
        _ORIGINALS[content["dtype"]],
        content["axis"],
        bool(content.get("input_scale")),
        bool(content.get("transposed")),
        content.get("groups") or "",
    )
