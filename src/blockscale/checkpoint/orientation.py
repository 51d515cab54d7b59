"""Weights that are stored (in, out), as GPT-2's ``Conv1D`` and the experts of gpt-oss.

Blocks along their last dimension would not run along the contraction. A file does not say which
dimension is contracted, but a bias has as many values as its layer has outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .files import Files
from .header import Stored

__all__ = ["outputs_last", "remedy"]

_WHY = "stored (in, out), as its bias or a like weight tells, so blocks would run along the outputs"


def remedy(tensor: Stored) -> str:
    """Why such a weight is not quantized, and what to do."""
    if len(tensor.shape) > 2:
        return f"{_WHY}; give blockscale.quantize(weight, format, axis=-2) to checkpoint.save_file"
    return (
        f"{_WHY}; call blockscale.quantize_ on the model, then checkpoint.save_file, which makes "
        "blocks along axis -2"
    )


def outputs_last(files: Files) -> set[str]:
    """Names of the weights in ``files`` whose last dimension is that of the outputs.

    That is where a bias has as many values as the last dimension, and not as the one before. A
    weight that does not tell (square, or without a bias) is taken to be as those like it: of the
    same last part of the name (``c_proj``), or parameters of the same module. Of a checkpoint in
    several files, those with the like weights are asked, too, as far as they are there.
    """
    tensors = dict(files.tensors)
    found, open_ = _judge(tensors, tensors)
    if open_ and not files.is_folder and (places := files.places):
        like = {key for name in open_ for key in _like(name)}
        names = {n for n in places if _bias(n) in places and not like.isdisjoint(_like(n))}
        for shard in sorted({places[each] for n in names for each in (n, _bias(n))}):
            if (files.folder / shard).exists():
                tensors = {**files.file(shard).header.tensors, **tensors}
        found, _ = _judge(tensors, files.tensors)
    return found


def _judge(
    tensors: Mapping[str, Stored], wanted: Mapping[str, Stored]
) -> tuple[set[str], set[str]]:
    """Of ``wanted``: the weights stored (in, out), and those that nothing in ``tensors`` tells."""
    told = {name: is_last for name in tensors if (is_last := _tells(name, tensors)) is not None}
    last = {key for name, is_last in told.items() if is_last for key in _like(name)}
    biases = {_bias(name) for name in tensors}
    matrices = {n for n, tensor in wanted.items() if len(tensor.shape) > 1 and n not in biases}
    silent = matrices - told.keys()
    follow = {name for name in silent if not last.isdisjoint(_like(name))}
    return follow | {name for name in matrices if told.get(name)}, silent - follow


def _tells(name: str, tensors: Mapping[str, Stored]) -> bool | None:
    """Whether the bias of a weight says that its outputs are last; None where it says nothing."""
    shape, bias = tensors[name].shape, tensors.get(_bias(name))
    if bias is None or len(shape) < 2 or shape[-1] == shape[-2]:
        return None
    return {shape[:-2] + shape[-1:]: True, shape[:-1]: False}.get(bias.shape)


def _bias(name: str) -> str:
    layer = name.removesuffix(".weight")
    return f"{layer}.bias" if layer != name else f"{name}_bias"


def _like(name: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that a weight shares with weights that are stored the same way round."""
    layer = name.removesuffix(".weight")
    module, _, part = layer.rpartition(".")
    if layer != name:
        yield "layer", part
        return
    yield "parameter", part
    if module:  # experts.gate_up_proj and experts.down_proj
        yield "module", module
