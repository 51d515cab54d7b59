"""A norm and the linear layer that reads it, as one: the norm's rows exist quantized only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..tensor import ScaledTensor
from . import passes
from .double_backward import refuse_double_backward
from .layer_plan import Metadata
from .linear import Linear, check_linear, check_operands
from .main_grad import apply, leaf_of, open_main_grad
from .norm import LayerNorm, Norm, RMSNorm
from .output_dtype import output_dtype
from .parts import is_untouched, make_forms, multiplies_quantized, served, serves_quantized
from .recipe import Recipe
from .reuse import hint_at_reuse, quantized_weight
from .unscripted import Unscripted

__all__ = ["LayerNormLinear", "RMSNormLinear"]


class _How(NamedTuple):
    """What a call has beside tensors; ``dgrad``: of the norm's rows, for what they are made of."""

    norm: Norm
    recipe: Recipe
    out_dtype: torch.dtype
    dgrad: bool
    wgrad: bool


class _NormedProduct(torch.autograd.Function):
    """Keeps x, and its normalized rows quantized by columns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        how: _How,
    ) -> Tensor:
        statistics: tuple[Tensor | None, Tensor] | None = None

        def make(format: str, **given: Any) -> Sequence[ScaledTensor]:
            nonlocal statistics
            matrix = passes.matrix_of(x)
            made, statistics = how.norm.quantize(matrix, norm_weight, norm_bias, format, **given)
            return made

        recipe, dgrad, wgrad = how.recipe, how.dgrad, how.wgrad
        forms = make_forms(make, recipe, "activations", x.device, rows=True, columns=wgrad)
        assert forms.rows is not None
        assert statistics is not None
        quantize_weight = partial(quantized_weight, dgrad=dgrad)
        y, scalar = passes.multiply(
            forms.rows, weight, bias, recipe, how.out_dtype, quantize_weight
        )
        of_norm = (x, norm_weight, *statistics) if dgrad else (None,) * 4
        of_product = (weight, scalar) if dgrad else (None, None)
        ctx.save_for_backward(*of_norm, *of_product, forms.columns)
        ctx.how, ctx.leaf = how, leaf_of("weight", weight) if wgrad else None
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.about = Metadata(recipe, x.shape, dtypes)
        ctx.norm_bias_dtype = None if norm_bias is None else norm_bias.dtype
        return passes.unflatten_rows(y, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how, main_grad = ctx.how, open_main_grad("weight", ctx.leaf)
        x, norm_weight, mean, rstd, weight, scalar, columns = ctx.saved_tensors
        of_norm: tuple[Tensor | None, ...] = (None, None, None)
        with torch.no_grad():
            needs = how.dgrad, how.wgrad, ctx.needs_input_grad[4]
            of_rows, of_weight, of_bias = passes.gradients(
                needs, ctx.about, grad, columns, weight, scalar, main_grad=main_grad
            )
            if of_rows is not None:
                matrix = passes.matrix_of(x)
                given = passes.matrix_of(of_rows), matrix, norm_weight, (mean, rstd)
                of_x, *others = how.norm.backward(*given, ctx.norm_bias_dtype)
                of_norm = of_x.reshape(x.shape), *others
        return *refuse_double_backward((*of_norm, of_weight, of_bias)), None


class _NormLinear(Unscripted, torch.nn.Module):
    """A norm, and the linear layer that reads it."""

    norm: Any
    linear: Any

    def forward(self, x: Tensor) -> Tensor:
        norm, linear = self.norm, self.linear
        known = next((cls for cls in (RMSNorm, LayerNorm) if is_untouched(norm, cls)), None)
        serves = known is not None and serves_quantized(x, linear)
        if known is None or not (serves or multiplies_quantized(x, linear)):
            y: Tensor = linear(norm(x))
            return y
        weight, bias, recipe = linear.weight, linear.bias, linear.recipe
        norm_bias = norm.bias if known is LayerNorm else None
        given = Norm(norm.eps, known is LayerNorm)
        if serves:
            check_operands(x, weight, bias)
            factors = norm.weight, norm_bias

            def make(format: str, **how: Any) -> Sequence[ScaledTensor]:
                return given.quantize(passes.matrix_of(x), *factors, format, **how)[0]

            return served(make, linear, x, output_dtype(x))
        check_linear(x, weight, bias, recipe)
        sources = x, norm.weight, norm_bias
        trains = torch.is_grad_enabled()
        dgrad = trains and any(each is not None and each.requires_grad for each in sources)
        wgrad = trains and weight.requires_grad
        if not (dgrad or wgrad):
            hint_at_reuse(weight)
        how = _How(given, recipe, output_dtype(x), dgrad, wgrad)
        y = apply(_NormedProduct, (weight,), *sources, weight, bias, how)
        return y

    @classmethod
    def _of(cls, norm: Any, linear: torch.nn.Linear, recipe: Recipe | None, known: type) -> Self:
        """Of parts that have the parameters."""
        theirs = torch.nn.RMSNorm if known is RMSNorm else torch.nn.LayerNorm
        if type(norm) not in (known, theirs):
            raise TypeError(
                f"norm: got {type(norm).__name__}; expected a torch.nn.{theirs.__name__}"
            )
        if type(linear) not in (Linear, torch.nn.Linear):
            raise TypeError(
                f"linear: got {type(linear).__name__}; expected a torch.nn.Linear or a "
                "blockscale.nn.Linear, without parametrizations"
            )
        features = (linear.in_features,)
        if tuple(norm.normalized_shape) != features or norm.weight is None:
            raise ValueError(
                f"norm: normalizes {tuple(norm.normalized_shape)} "
                f"{'with' if norm.weight is not None else 'without'} a weight; expected "
                f"{features}, the input of linear, with one"
            )
        if norm.eps is None:
            raise ValueError(
                "norm: its eps is None, which depends on the type of its input; set norm.eps, as "
                "1e-6, or what torch.finfo says of that type"
            )
        if recipe is None:
            recipe = getattr(linear, "recipe", None)
        others = {} if known is RMSNorm else {"norm_bias": norm.bias is not None}
        shape = linear.in_features, linear.out_features, linear.bias is not None, norm.eps
        made = cls(*shape, device="meta", recipe=recipe, **others)
        for part, source in ((made.norm, norm), (made.linear, linear)):
            for name, parameter in source._parameters.items():
                setattr(part, name, parameter)
        made.linear.go_on_from(linear)
        return made.train(linear.training)


class RMSNormLinear(_NormLinear):
    """RMSNorm, then a linear layer: ``linear(norm(x))``, whose norm writes what products read.

    >>> layer = bs.nn.RMSNormLinear(512, 256, recipe=bs.Recipe("mxfp8"))
    >>> y = layer(torch.randn(8, 512))

    ``norm`` is a :class:`RMSNorm`, ``linear`` a :class:`Linear`, and the result and all gradients
    have the bits of these two one after the other. The normalized rows, rounded to the dtype of
    ``x``, are quantized along rows for fprop and, in training, along columns for wgrad, as they are
    made (:func:`blockscale.rmsnorm_quantize`): they do not exist in high precision. Until the
    backward, ``x``, the rstd of its rows and the columns are kept.

    The state_dict has ``norm.weight``, ``linear.weight`` and ``linear.bias``: that of a
    Sequential of an OrderedDict with these two names. Use :meth:`of` for layers that are there.

    The two run one after the other, to the same bits, where one has hooks or was made something
    else (``convert(model, None)``, tensor parallelism, shards of its own), where ``recipe`` has
    products in high precision or, by :func:`blockscale.quantize_`, leaves activations as they are,
    and under torch.func. :func:`blockscale.quantize_` changes ``linear``, whose operand is then
    quantized as it is made under ``torch.no_grad()``.

    Args:
        in_features, out_features, bias: of the linear layer.
        eps: of the norm.
        recipe: of the linear layer; :func:`blockscale.convert` changes it.

    Raises TypeError or ValueError as :class:`Linear` and :func:`blockscale.rmsnorm_quantize`.

    Source: TransformerEngine, ``LayerNormLinear(normalization="RMSNorm")``.
    """

    norm: RMSNorm
    linear: Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(in_features, eps, device, dtype)
        self.linear = Linear(in_features, out_features, bias, device, dtype, recipe=recipe)

    @classmethod
    def of(
        cls, norm: torch.nn.RMSNorm, linear: torch.nn.Linear, recipe: Recipe | None = None
    ) -> RMSNormLinear:
        """The layer that has their parameters: the same tensors, so that optimizers stay valid.

        >>> norm, linear = torch.nn.RMSNorm(512, 1e-6), torch.nn.Linear(512, 256)
        >>> layer = bs.nn.RMSNormLinear.of(norm, linear, bs.Recipe("mxfp8"))

        ``recipe``: None for that of ``linear``, if it has one, or the default. Raises TypeError for
        other modules, ValueError for a norm of another size, without a weight or an eps.
        """
        return cls._of(norm, linear, recipe, RMSNorm)


class LayerNormLinear(_NormLinear):
    """LayerNorm, then a linear layer: :class:`RMSNormLinear` with a :class:`LayerNorm`.

    >>> layer = bs.nn.LayerNormLinear(512, 256, recipe=bs.Recipe("mxfp8"))
    >>> y = layer(torch.randn(8, 512))

    ``norm_bias``: whether the norm has a bias, ``norm.bias``. Its kept mean is that of each row.

    Source: TransformerEngine, ``LayerNormLinear``.
    """

    norm: LayerNorm
    linear: Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm_bias: bool = True,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(in_features, eps, norm_bias, device, dtype)
        self.linear = Linear(in_features, out_features, bias, device, dtype, recipe=recipe)

    @classmethod
    def of(
        cls, norm: torch.nn.LayerNorm, linear: torch.nn.Linear, recipe: Recipe | None = None
    ) -> LayerNormLinear:
        """As :meth:`RMSNormLinear.of`.

        >>> norm, linear = torch.nn.LayerNorm(512), torch.nn.Linear(512, 256)
        >>> layer = bs.nn.LayerNormLinear.of(norm, linear, bs.Recipe("mxfp8"))
        """
        return cls._of(norm, linear, recipe, LayerNorm)
