"""``gptq``: weights rounded so that what layers compute on real inputs changes least.

Of a layer with weight W (N, K) and inputs x (K) the error is E |(W - Q) x|^2: over rows the sum of
(w - q) H (w - q)^T with H = E[x x^T], half of the Hessian of that error. With H = U D U^T, U upper
triangular with ones on its diagonal, that is the sum over columns j of
D[j] (w[j] - q[j] + sum_{i<j} (w[i] - q[i]) U[i, j])^2, so each column is rounded as it is wanted
after those before it. This is GPTQ (arXiv 2210.17323) without an inverse of H, as in QuIP (arXiv
2307.13304, theorem 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .calibration import run, watch_inputs
from .formats import Element, Format, get_format
from .layer_weights import global_scales, layer_weights
from .measure import amax
from .quantization import check_scaling_of_weights
from .quantize import quantize
from .rounding import decode, decode_scale, global_scale_from_amax, pack
from .tensor import ScaledTensor

__all__ = ["gptq", "round_columns"]

_DAMPING = 0.01  # of the mean of H's diagonal, added to it, as in the paper
#: More, times columns per row, less 1, of moments of fewer rows than columns: an expert that few
#: tokens reached is rounded nearly as if nothing were known of its inputs.
_DAMPING_OF_FEW = 0.1


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
    """Quantize the weights of a model's linear layers and experts so that what they compute on data
    changes least (GPTQ, arXiv 2210.17323).

    >>> weights = bs.gptq(model, [batch], "nvfp4", scaling="search")
    >>> weights["0.weight"].format.name
    'nvfp4'

    Of inputs no more than their second moments are kept (the Hessian of GPTQ), (K, K) numbers in
    fp32 for each layer of K inputs. Where those of all layers are more than ``memory``, the model
    runs on ``batches`` several times, for some layers each, in the model's order: then later ones
    see inputs from quantized ones.

    Args:
        model: with ``torch.nn.Linear`` layers, and experts as transformers holds them (stacks of
            matrices (N, K)). It runs as it is: call ``model.eval()`` before.
            **Its weights are changed** to those that the result dequantizes to, and some are where
            this raises: load it again then.
        batches: what it is called with, as in :func:`blockscale.calibrate`; a list, or what can be
            gone through again. 128 sequences of 512 tokens are enough for most models.
        format: a name of :data:`blockscale.formats`.
        scaling: how blocks of NVFP4 get their scales, see :class:`blockscale.Quantization`.
        filter_fn: called with each linear layer and its name, and for each expert's matrix with the
            module of experts and ``"...experts.3.gate_proj"``; True for those to be quantized.
            None: all but :data:`blockscale.nn.DEFAULT_EXCLUDE`.
        power_of_two: round global scales of NVFP4 up to powers of two, as convention
            "compressed-tensors" has them, which stores their reciprocals.
        memory: bytes for second moments at a time; one layer has its own at least.

    Returns:
        name of the weight -> quantized, (N, K) with blocks along K, for
        :func:`blockscale.checkpoint.quantize_folder`; of a weight that layers share the first
        name. Missing are layers and experts that no batch reached, or whose inputs are no multiple
        of a block, experts whose stacks are (in, out) or have gates and ups in turn, as gpt-oss's,
        and weights that are no parameters in float32, bfloat16 or float16 (those that a
        parametrization computes, and those that are quantized already).

    Raises:
        ValueError: no batches, no layer that can be quantized, batches that cannot be gone through
            again, inputs or weights that are not finite, an unknown format or scaling.
    """
    fmt = get_format(format)
    check_scaling_of_weights(scaling, fmt)
    weights = layer_weights(model, fmt, filter_fn)
    if not weights:
        why = (
            "filter_fn takes some" if filter_fn else "heads, routers and embeddings are left alone"
        )
        raise ValueError(
            f"model: has no linear layer that could be {fmt.name}; inputs must be a multiple of "
            f"{fmt.block_size}, weights parameters in float32, bfloat16 or float16, and {why}"
        )
    if elsewhere := next((name for name, weight in weights.items() if weight.is_meta), ""):
        raise ValueError(
            f"model: the weight of {elsewhere} is on device meta, where it has no values; load the "
            "model without offloading"
        )
    names: dict[Any, str] = {}  # of memory, the first one
    first = {
        name: names.setdefault((weight.data_ptr(), weight.shape), name)
        for name, weight in weights.items()
    }
    turns = list(_that_fit({name: weights[name] for name in names.values()}, memory))
    if len(turns) > 1 and iter(batches) is batches:
        raise ValueError(
            f"batches: can be gone through once, and the model runs {len(turns)} times, as second "
            f"moments take more than {memory} bytes; pass a list, or more memory"
        )
    scales = global_scales(weights, fmt, scaling, power_of_two=power_of_two)
    done: dict[str, ScaledTensor] = {}
    for some in turns:
        for name, moments in _second_moments(model, some, first, batches).items():
            weight = some[name]
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


def _that_fit(weights: Mapping[str, Tensor], memory: int) -> Iterator[dict[str, Tensor]]:
    """Weights whose inputs' second moments take ``memory`` together, one at least."""
    some: dict[str, Tensor] = {}
    taken = 0
    for name, weight in weights.items():
        nbytes = 4 * weight.shape[1] ** 2
        if some and taken + nbytes > memory:
            yield some
            some, taken = {}, 0
        some[name] = weight
        taken += nbytes
    yield some


def _second_moments(
    model: torch.nn.Module,
    layers: Container[str],
    first: Mapping[str, str],
    batches: Iterable[Any],
) -> dict[str, Tensor]:
    """Sums of x x^T over the rows of the inputs of layers, by the first name of their weight; with
    something on the diagonal where there were few."""
    sums: dict[str, Tensor] = {}
    count: Counter[str] = Counter()

    def look(name: str, x: Tensor) -> None:
        name = first.get(name, "")
        if name in layers and x.numel():
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            if name not in sums:
                sums[name] = rows.new_zeros(x.shape[-1], x.shape[-1])
            sums[name].addmm_(rows.mT, rows)
            count[name] += len(rows)

    with watch_inputs(model, look):
        run(model, batches)
    for name, moments in sums.items():
        lacking = max(0.0, len(moments) / count[name] - 1)
        moments.diagonal().add_(_DAMPING_OF_FEW * lacking * moments.diagonal().mean())
    return sums
