"""``save_file``, ``load_file`` and ``load_folder``: state dicts with ScaledTensors in them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..fused_names import fused_with
from ..tensor import ScaledTensor
from .files import Files
from .folders import read_config
from .header import METADATA, build, show
from .ours import INPUT_SCALE, describe, metadata_for
from .reading import descriptions_of
from .storage import Description, check_names, dtype_name, layer_of, part_names
from .writer import replacing, tensor_bytes

__all__ = ["load_file", "load_folder", "save_file"]


def save_file(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors, quantized ones among them, as one safetensors file.

    >>> checkpoint.save_file(model.state_dict(), "model.safetensors")

    Scales are stored compact, whatever their layout. ``path`` is replaced when the new file is
    complete and on disk. Tensors that share memory are written as often as they have names. NVFP4
    tensors get an ``input_scale`` of 1, unless ``tensors`` has one of that name. Weights that
    servers fuse and whose global scales differ are written as they are, with a UserWarning.

    Args:
        tensors: name -> ScaledTensor or dense tensor, on any device.
        path: of the file; its directory exists.
        metadata: strings for the header.

    Raises:
        TypeError: ``tensors`` is no dictionary, or something in it no dense tensor, or of a dtype
            that the format lacks.
        ValueError: a name is taken twice (``w`` quantized and another tensor ``w_scale``).
        OSError: no such directory, or no room.
    """
    if not isinstance(tensors, Mapping):
        example = (
            "model.state_dict()" if isinstance(tensors, torch.nn.Module) else '{"weight": tensor}'
        )
        raise TypeError(
            f"tensors: got {type(tensors).__name__}; expected a dictionary of tensors, as {example}"
        )
    parts: dict[str, Tensor] = {}
    descriptions: dict[str, Description] = {}
    names: list[str] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == METADATA:
            raise ValueError(f"tensors: {name!r} cannot be the name of a tensor; rename it")
        if isinstance(tensor, ScaledTensor):
            descriptions[name], own = describe(tensor)
            if f"{layer_of(name)}input_scale" in tensors:  # that stays, as any tensor
                descriptions[name] = replace(descriptions[name], has_input_scale=False)
            own = {stored: own[part] for part, stored in descriptions[name].names(name).items()}
        elif isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            own = {name: tensor.detach()}
        else:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"tensors: {show(name)} is {kind}; expected a dense torch.Tensor")
        names += own
        parts |= own
    check_names(names, "tensors")
    _warn_of_fused(tensors)
    try:
        items = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in parts.items()]
    except TypeError as error:
        raise TypeError(f"tensors: {error}") from None
    head, header = build(items, metadata_for(descriptions, metadata or {}))
    with replacing(Path(path), "path") as file:
        file.write(head)
        for name in header.tensors:
            file.write(tensor_bytes(parts[name].cpu().contiguous()))


def _warn_of_fused(tensors: Mapping[str, Tensor]) -> None:
    """Say which weights a server would multiply by another one's global scale."""
    for name in tensors:
        group = [tensors[each] for each in fused_with(name) if each in tensors]
        scales = [q.global_scale for q in group if isinstance(q, ScaledTensor)]
        values = {tuple(scale.flatten().tolist()) for scale in scales if scale is not None}
        if len(values) > 1:
            warnings.warn(
                f"tensors: {show(name)} and what servers fuse with it have {len(values)} global "
                "scales; vLLM takes the largest for all, and values would be wrong there. For "
                "servers quantize the high-precision file by `blockscale quantize`, or give "
                "blockscale.quantize one global_scale for the group",
                UserWarning,
                stacklevel=3,
            )
            return


def load_file(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Read what :func:`save_file` or :func:`quantize_file` wrote, or any safetensors file.

    >>> state = checkpoint.load_file("model.mxfp8.safetensors")
    >>> state["layer.weight"]
    ScaledTensor(mxfp8, shape=(256, 512), axis=-1, layout=compact, dtype=torch.bfloat16, device=cpu)

    What others quantized is read as well, where a ``config.json`` beside the file says how
    (:data:`~blockscale.checkpoint.CONVENTIONS`).

    Returns:
        name -> :class:`~blockscale.ScaledTensor` with compact scales, or plain tensor. An
        ``input_scale`` is among them where it is not the default.

    Raises:
        ValueError: the file is damaged, truncated or hostile, or its parts do not fit; it is
            quantized in a way that is not known.
        OSError: it cannot be read.
    """
    return _load(path, device, folder=False)


def load_folder(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Read all weights of a folder, as :func:`load_file` does one file.

    >>> state = checkpoint.load_folder("DeepSeek-V3")
    >>> state["model.layers.0.mlp.gate_proj.weight"].format.name
    'fp8_128x128'

    Args:
        path: a folder with ``*.safetensors`` and their index, or with one such file.
        device: where tensors are put.

    Returns and raises as :func:`load_file`; ValueError also for an index that names what is not
    there.
    """
    return _load(path, device, folder=True)


def _load(
    path: str | os.PathLike[str], device: str | torch.device, folder: bool
) -> dict[str, Tensor]:
    if os.path.exists(path) and os.path.isdir(path) != folder:
        what, other = ("a file", "load_file") if folder else ("a folder", "load_folder")
        raise ValueError(f"path: {path} is {what}; give it to checkpoint.{other}")
    with Files(path) as files:
        descriptions = descriptions_of(files, read_config(files, "path"), "path")
        parts = part_names(descriptions)

        def read(stored: str) -> Tensor:
            return files.holder(stored).tensor(stored)

        out: dict[str, Tensor] = {}
        try:
            for name in files.tensors.keys() - parts:
                out[name] = read(name).to(device)
            for name, description in descriptions.items():
                out[name] = description.assemble(name, read).to(device)
                if (given := description.names(name).get("input_scale")) is not None:
                    place = description.storage.places["input_scale"]
                    value = place.decode(read(given), torch.float32).reshape(())
                    if value.item() != INPUT_SCALE:
                        out[f"{layer_of(name)}input_scale"] = value.to(device)
        except ValueError as error:
            raise ValueError(f"path: {path}: {error}; save it again") from None
        return {name: out[name] for name in sorted(out)}
