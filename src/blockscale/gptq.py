"""``gptq``: weights rounded so that what layers compute on real inputs changes least.

Of a layer with weight W (N, K) and inputs x (K) the error is E |(W - Q) x|^2: over rows the sum of
(w - q) H (w - q)^T with H = E[x x^T], half of the Hessian of that error. With H = U D U^T, U upper
triangular with ones on its diagonal, that is the sum over columns j of
D[j] (w[j] - q[j] + sum_{i<j} (w[i] - q[i]) U[i, j])^2, so each column is rounded as it is wanted
after those before it. This is GPTQ (arXiv 2210.17323) without an inverse of H, as in QuIP (arXiv
2307.13304, theorem 6).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .calibration import run, watch_inputs
from .formats import Element, Format, get_format
from .fused_names import fused_with
from .measure import amax
from .nn.exclude import default_exclusions
from .quantization import check_scaling_of_weights
from .quantize import quantize
from .rounding import decode, decode_scale, global_scale_from_amax, pack
from .tensor import ScaledTensor

__all__ = ["global_scales", "gptq", "linear_layers", "round_columns"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DAMPING = 0.01  # of the mean of H's diagonal, added to it, as in the paper


def gptq(
    model: torch.nn.Module,
    batches: Iterable[Any],
    format: str | Format = "nvfp4",
    *,
    scaling: str = "amax",
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    power_of_two: bool = False,
    memory: int = 4 << 30,
) -> dict[str, ScaledTensor]:
    """Quantize the weights of a model's linear layers so that what they compute on data changes
    least (GPTQ, arXiv 2210.17323).

    >>> weights = bs.gptq(model, [batch], "nvfp4", scaling="search")
    >>> weights["0.weight"].format.name
    'nvfp4'

    Of inputs no more than their second moments are kept (the Hessian of GPTQ), (K, K) numbers in
    fp32 for each layer of K inputs. Where those of all layers are more than ``memory``, the model
    runs on ``batches`` several times, for some layers each, in the model's order: then later ones
    see inputs from quantized ones.

    Args:
        model: with ``torch.nn.Linear`` layers. It runs as it is: call ``model.eval()`` before.
            **Its weights are changed** to those that the result dequantizes to, and some are where
            this raises: load it again then.
        batches: what it is called with, as in :func:`blockscale.calibrate`; a list, or what can be
            gone through again. 128 sequences of 512 tokens are enough for most models.
        format: a name of :data:`blockscale.formats`.
        scaling: how blocks of NVFP4 get their scales, see :class:`blockscale.Quantization`.
        filter_fn: called with each linear layer and its name; True for those to be quantized. None:
            all but :data:`blockscale.nn.DEFAULT_EXCLUDE`.
        power_of_two: round global scales of NVFP4 up to powers of two, as convention
            "compressed-tensors" has them, which stores their reciprocals.
        memory: bytes for second moments at a time; one layer has its own at least.

    Returns:
        name of the weight -> quantized, (N, K) with blocks along K, for
        :func:`blockscale.checkpoint.quantize_folder`; of a weight that layers share the first
        name. Missing are layers that no batch reached, or whose inputs are no multiple of a block,
        experts in stacks, and weights that are no parameters in float32, bfloat16 or float16 (those
        that a parametrization computes, and those that are quantized already).

    Raises:
        ValueError: no batches, no layer that can be quantized, batches that cannot be gone through
            again, inputs or weights that are not finite, an unknown format or scaling.
    """
    fmt = get_format(format)
    check_scaling_of_weights(scaling, fmt)
    layers = linear_layers(model, fmt, filter_fn)
    if not layers:
        why = (
            "filter_fn takes some" if filter_fn else "heads, routers and embeddings are left alone"
        )
        raise ValueError(
            f"model: has no linear layer that could be {fmt.name}; inputs must be a multiple of "
            f"{fmt.block_size}, weights parameters in float32, bfloat16 or float16, and {why}"
        )
    if elsewhere := next((name for name, layer in layers.items() if layer.weight.is_meta), ""):
        raise ValueError(
            f"model: the weight of {elsewhere} is on device meta, where it has no values; load the "
            "model without offloading"
        )
    names: dict[int, str] = {}  # of weights, the first one
    first = {name: names.setdefault(id(layer.weight), name) for name, layer in layers.items()}
    turns = list(_that_fit({name: layers[name] for name in names.values()}, memory))
    if len(turns) > 1 and iter(batches) is batches:
        raise ValueError(
            f"batches: can be gone through once, and the model runs {len(turns)} times, as second "
            f"moments take more than {memory} bytes; pass a list, or more memory"
        )
    scales = global_scales(layers, fmt, scaling, power_of_two=power_of_two)
    done: dict[str, ScaledTensor] = {}
    for some in turns:
        for name, moments in _second_moments(model, some, first, batches).items():
            weight = some[name].weight
            try:
                with torch.autocast(weight.device.type, enabled=False):
                    q = round_columns(
                        weight, moments, fmt, global_scale=scales.get(name), scaling=scaling
                    )
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            with torch.no_grad():
                weight.copy_(q.dequantize())
            done[f"{name}.weight"] = q
    if not done:
        raise ValueError(
            "batches: no layer that can be quantized saw one; pass inputs that the model is called "
            "with"
        )
    return done


def round_columns(
    weight: Tensor,
    moments: Tensor,
    format: str | Format,
    *,
    global_scale: Tensor | None = None,
    scaling: str = "amax",
) -> ScaledTensor:
    """Quantize one weight for inputs with these second moments.

    >>> x, weight = torch.randn(512, 64), torch.randn(32, 64)
    >>> q = round_columns(weight, x.mT @ x / len(x), "mxfp8")

    Args:
        weight: (N, K).
        moments: fp32 (K, K), E[x x^T] times any number: the Hessian of GPTQ.
        format: a name of :data:`blockscale.formats`.
        global_scale: fp32 scalar of formats that have one; None: of ``weight`` alone.
        scaling: of blocks, each of which gets its scale when its first column is due.

    Raises ValueError for weights and moments that are not finite.
    """
    fmt = get_format(format)
    w, feedback = weight.detach().float(), _unit_upper(moments)
    if not w.isfinite().all():
        raise ValueError("weight: has NaN or infinities; leave the layer out, or repair it")
    if fmt.has_global_scale and global_scale is None:
        global_scale = global_scale_from_amax(amax(w), fmt, scaling)
    lost = torch.zeros_like(w)  # weight - rounded, of columns that are done
    data, scale = [], []
    step, table = fmt.block[1], _table(fmt.element, w.device)
    for first in range(0, w.shape[1], step):
        block = slice(first, min(first + step, w.shape[1]))
        wanted = w[:, block] + lost[:, :first] @ feedback[:first, block]
        q = quantize(wanted, fmt, global_scale=global_scale, scaling=scaling)
        factors = _factors(q)
        codes = torch.zeros(len(w), step, dtype=torch.uint8, device=w.device)
        for j, column in enumerate(range(block.start, block.stop)):
            codes[:, j], rounded = _nearest(wanted[:, j], factors, table, fmt.element)
            lost[:, column] = w[:, column] - rounded
            wanted[:, j + 1 :] += torch.outer(
                lost[:, column], feedback[column, column + 1 : block.stop]
            )
        data.append(pack(codes, fmt.element))
        scale.append(q.scale)
    return ScaledTensor(
        torch.cat(data, 1),
        torch.cat(scale, 1),
        format=fmt,
        shape=w.shape,
        dtype=weight.dtype,
        global_scale=global_scale,
    )


def _unit_upper(moments: Tensor) -> Tensor:
    """U of U D U^T, which is ``moments`` with something added to its diagonal."""
    mean = moments.diagonal().mean()
    # no input but zeros, or what fp32 cannot square: any rounding will do
    damping = _DAMPING * mean if mean > torch.finfo(mean.dtype).tiny / _DAMPING else mean + 1
    while (mean + damping).isfinite():
        damped = moments.clone()
        damped.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            factor = factor.flip(0, 1)
            return factor / factor.diagonal()
        damping = damping * 10  # sums of many numbers may be off by more than the least of them
    raise ValueError("batches: give it inputs with NaN or infinities; leave those out")


def _table(element: Element, device: torch.device) -> tuple[Tensor, Tensor]:
    """Magnitudes of an element by code, and the largest number that is rounded to each but the
    last: to nearest, ties to even."""
    codes = torch.arange(element.max_code + 1, dtype=torch.uint8, device=device)
    magnitudes = decode(codes, element)
    halfway = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = torch.nextafter(halfway, torch.zeros_like(halfway))
    return magnitudes, torch.where(codes[:-1] % 2 == 0, halfway, below)


def _factors(q: ScaledTensor) -> tuple[Tensor, Tensor]:
    """What elements of each row of ``q``, one block wide, are multiplied with, and its
    reciprocal: 0 for blocks of zeros."""
    scale = decode_scale(q.scale, q.format.scale)[:, 0]
    scale = scale if q.global_scale is None else scale * q.global_scale
    scale = scale.repeat_interleave(q.format.block[0])[: q.shape[0]]
    return scale, torch.where(scale == 0, 0, (1 / scale).clamp(max=torch.finfo(scale.dtype).max))


def _nearest(
    wanted: Tensor,
    factors: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor],
    element: Element,
) -> tuple[Tensor, Tensor]:
    """Codes, as :func:`quantize` rounds with these scales, and what they stand for."""
    code = torch.bucketize(wanted.abs() * factors[1], table[1])
    rounded = torch.copysign(table[0][code] * factors[0], wanted)
    return code | wanted.signbit() * element.sign_code, rounded


def linear_layers(
    model: torch.nn.Module,
    format: Format,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> dict[str, torch.nn.Linear]:
    """The linear layers of a model that can be quantized to ``format``, by name; ``filter_fn``
    chooses as in :func:`gptq`."""
    why_not = default_exclusions(model)
    takes = filter_fn or (lambda module, name: not why_not(module, name))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module.in_features % format.block_size == 0
        and _is_plain(dict(module.named_parameters(recurse=False)).get("weight"))
        and takes(module, name)
    }


def _is_plain(weight: Tensor | None) -> bool:
    """Whether it is a parameter, not computed from others, with values that can be rounded."""
    return (
        weight is not None
        and not torch.nn.parameter.is_lazy(weight)
        and not isinstance(weight, ScaledTensor)
        and weight.dtype in _DTYPES
        and weight.numel() > 0
    )


def global_scales(
    layers: Mapping[str, torch.nn.Linear],
    format: Format,
    scaling: str = "amax",
    *,
    power_of_two: bool = False,
) -> dict[str, Tensor]:
    """The global scale of each layer; layers that servers fuse share one. Empty for formats that
    have none."""
    if not format.has_global_scale:
        return {}
    largest = {name: amax(layer.weight) for name, layer in layers.items()}
    scales = {}
    for name in layers:
        group = [largest[each] for each in fused_with(name) if each in largest]
        scales[name] = global_scale_from_amax(
            torch.stack(group).amax(), format, scaling, power_of_two=power_of_two
        )
    return scales


def _that_fit(
    layers: Mapping[str, torch.nn.Linear], memory: int
) -> Iterator[dict[str, torch.nn.Linear]]:
    """Layers whose second moments take ``memory`` together, one at least."""
    some: dict[str, torch.nn.Linear] = {}
    taken = 0
    for name, layer in layers.items():
        nbytes = 4 * layer.in_features**2
        if some and taken + nbytes > memory:
            yield some
            some, taken = {}, 0
        some[name] = layer
        taken += nbytes
    yield some


def _second_moments(
    model: torch.nn.Module,
    layers: Container[str],
    first: Mapping[str, str],
    batches: Iterable[Any],
) -> dict[str, Tensor]:
    """Sums of x x^T over the rows of the inputs of layers, by the first name of their weight."""
    sums: dict[str, Tensor] = {}

    def look(name: str, x: Tensor) -> None:
        name = first.get(name, "")
        if name in layers and x.numel():
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            if name not in sums:
                sums[name] = rows.new_zeros(x.shape[-1], x.shape[-1])
            sums[name].addmm_(rows.mT, rows)

    with watch_inputs(model, look, experts=False):
        run(model, batches)
    return sums
