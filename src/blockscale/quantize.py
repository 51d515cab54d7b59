"""``quantize`` and ``quantize_both``: check what was given, dispatch, wrap."""

from __future__ import annotations

from torch import Tensor

from . import ops
from .checks import check_axis
from .formats import Format
from .hadamard import Hadamard
from .layouts import Layout
from .quantization import check_eden
from .quantize_checks import Arguments, Call, check, check_hadamard, resolve_global_scale
from .seed import Seed, for_op
from .tensor import ScaledTensor

__all__ = ["quantize", "quantize_both", "wrap"]

_BOTH = (-1, -2)


def quantize(
    x: Tensor,
    format: str | Format = "mxfp8",
    axis: int = -1,
    *,
    scale_rounding: str | None = None,
    layout: str | Layout = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    offsets: Tensor | None = None,
    gather: Tensor | None = None,
    seed: int | Seed | None = None,
    square: bool = False,
    hadamard: Hadamard | None = None,
    scaling: str = "amax",
    k_major: bool = False,
    backend: str = "auto",
) -> ScaledTensor:
    """Quantize ``x`` (..., M, K) in blocks along ``axis``.

    >>> q = bs.quantize(torch.randn(256, 512), "mxfp8")
    >>> q.qdata.shape, q.scale.shape
    (torch.Size([256, 512]), torch.Size([256, 16]))

    Args:
        x: float32, bfloat16 or float16, last dimension contiguous, not empty.
        format: a name of :data:`blockscale.formats`.
        axis: the contraction of the product to come: -1 or -2.
        scale_rounding: one of ``format.scale.roundings``, default the first of them (``rceil`` for
            E8M0). ``fp8_1x128`` and ``fp8_128x128`` take those of E8M0 too and then have powers of
            two in fp32.
        layout: where the scales are written, see :data:`blockscale.layouts`.
        nonfinite: ``"propagate"``: a NaN or infinity makes its whole block NaN. ``"te"``: as
            Transformer Engine, a NaN stays alone and an infinity saturates.
        global_scale: fp32 multiplier that dequantizes, for formats with one (NVFP4); default
            ``amax(x) / (448 * 6)``, which costs a second read of ``x``. Or ``x.shape[:-2]``, one
            for each matrix of a batch, which kernels quantize one after another. It is kept, as
            ``offsets`` are, not copied unless it lies apart: writing to one later changes what the
            result stands for.
        pad: allow a contraction that is not a multiple of the block: the data is then padded with
            zeros to whole blocks, ``shape`` stays that of ``x``.
        offsets: int32 (groups,), ascending: the end of each expert's rows (dimension -2). With
            ``axis=-2`` blocks start anew in each group (no padding needed), and groups are moved
            apart to tiles of 128 (docs/layouts.md), but for 8-bit data that is not ``k_major``;
            with ``axis=-1`` the scales of each group start on a 128-row tile in layouts of tiles
            (tcgen05, packed), and stay where they are in others.
        gather: int32 (R,), quantize rows ``x[gather]`` of a matrix, as
            :attr:`blockscale.Routing.tokens` names them, from one read of these; a default global
            scale is that of all of ``x``. On a GPU a number that no row of ``x`` has makes a row of
            NaN.
        seed: round elements stochastically with this seed instead of to nearest even: an int, or a
            :class:`Seed` of a step, and of ranks that have parts of a tensor.
        square: one scale for each square of elements, of 16 x 16 in NVFP4, 32 x 32 in MXFP8: its
            rows, or columns, have it alike, so that both axes have the same elements, as weights
            that are multiplied along both. For formats whose blocks are of one row; groups of
            ``offsets`` would cut squares.
        hadamard: transform ``x`` along ``axis`` before, in fp32: a :class:`Hadamard`, the same for
            both operands of a product. GPU kernels do it in passing, for rows, and for columns of
            4 bits; else plain torch does.
        scaling: of NVFP4, how a block's scale is chosen, see :class:`blockscale.Quantization`;
            ``"ms_eden"`` needs ``hadamard`` and ``seed``, which rounds scales then. GPU kernels do
            it in passing, else plain torch.
        k_major: store 8-bit columns (``axis=-2``) with the contraction contiguous, as Hopper's FP8
            tensor cores read them: ``qdata`` is then the ``mT`` of a contiguous tensor, each of
            whose rows starts at a multiple of 32 bytes. Values and scales are the same. Rows, and
            packed data, lie so without it.
        backend: ``"auto"``: compiled kernels where there are some for this call, else the
            reference, plain torch; on a GPU a :class:`FallbackWarning` says so, once for each
            operation and reason. ``"kernel"``: a kernel, or ValueError. ``"reference"``: plain
            torch. All of them give the same bytes.

    Returns:
        A :class:`ScaledTensor` of the shape and dtype of ``x``. It has no gradient:
        :func:`blockscale.nn.linear` is the differentiable way.

    Raises:
        TypeError: ``x`` is no dense tensor of these dtypes.
        ValueError: anything else that cannot be, with the remedy.

    Source: OCP MX v1.0 section 6.3 with the scale rounded up (arXiv 2506.08027).
    """
    axis = check_axis(axis)
    asked = Arguments(
        *((axis,), format, scale_rounding, (layout,), nonfinite),
        *(pad, k_major, backend, square, scaling),
    )
    call = check(x, asked, offsets, seed, gather)
    source, transform, signs_step = x.detach() if x.requires_grad else x, None, None
    if hadamard is not None:
        check_hadamard(hadamard, x, axis, gather, offsets)
        transform, signs_step = hadamard.for_op()
    check_eden(scaling, hadamard, seed is not None)
    scalar = resolve_global_scale(
        *(global_scale, source, call.format, backend),
        per_matrix=True,
        axis=axis,
        hadamard=hadamard,
        scaling=scaling,
    )
    numbers, step = for_op(seed, _rows_of(x, gather).shape)
    data, scale = ops.quantize(
        source,
        call.format.name,
        axis,
        call.scale_rounding,
        nonfinite,
        call.layouts[0].name,
        scalar,
        offsets,
        numbers,
        backend,
        k_major,
        gather,
        square,
        step,
        transform,
        scaling,
        signs_step,
    )
    return wrap(_rows_of(x, gather), call, 0, data, scale, scalar, offsets)


def quantize_both(
    x: Tensor,
    format: str | Format = "mxfp8",
    *,
    scale_rounding: str | None = None,
    layout: str | Layout | tuple[str | Layout, str | Layout] = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    offsets: Tensor | None = None,
    gather: Tensor | None = None,
    seed: int | Seed | None = None,
    square: bool = False,
    scaling: str = "amax",
    k_major: bool = False,
    backend: str = "auto",
) -> tuple[ScaledTensor, ScaledTensor]:
    """``x`` (..., M, K) quantized along rows (axis -1) and along columns (axis -2).

    >>> rows, columns = bs.quantize_both(torch.randn(256, 512), "mxfp8")

    Two different tensors, both from high precision: one for the product that contracts K, one for
    that which contracts M. GPU kernels make both from one read of ``x``. Takes the arguments of
    :func:`quantize` but ``axis`` and ``hadamard``; NVFP4's global scale is found once.

    Args:
        layout: of both, or a pair: of the rows' and of the columns' scales.

    Returns: the tensors along -1 and along -2. Raises TypeError or ValueError as :func:`quantize`.
    """
    pair = layout if isinstance(layout, tuple) else (layout, layout)
    asked = Arguments(
        *(_BOTH, format, scale_rounding, pair, nonfinite),
        *(pad, k_major, backend, square, scaling),
    )
    call = check(x, asked, offsets, seed, gather)
    check_eden(scaling, None)
    scalar = resolve_global_scale(
        global_scale, x, call.format, backend, per_matrix=True, scaling=scaling
    )
    source = x.detach() if x.requires_grad else x
    numbers, step = for_op(seed, _rows_of(x, gather).shape)
    row, row_scale, column, column_scale = ops.quantize_both(
        source,
        call.format.name,
        call.scale_rounding,
        nonfinite,
        call.layouts[0].name,
        call.layouts[1].name,
        scalar,
        offsets,
        numbers,
        backend,
        k_major,
        gather,
        square,
        step,
        None,
        scaling,
    )
    like = _rows_of(x, gather)
    return (
        wrap(like, call, 0, row, row_scale, scalar, offsets),
        wrap(like, call, 1, column, column_scale, scalar, offsets),
    )


def _rows_of(x: Tensor, gather: Tensor | None) -> Tensor:
    """Not the rows: a tensor of their shape and dtype."""
    return x if gather is None else x[:1].expand(gather.shape[0], -1)


def wrap(
    x: Tensor,
    call: Call,
    i: int,
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    offsets: Tensor | None,
) -> ScaledTensor:
    """The tensor of axis number ``i`` of a call."""
    axis = call.axes[i]
    return ScaledTensor(
        data,
        scale,
        format=call.format,
        shape=x.shape,
        axis=axis,
        dtype=x.dtype,
        layout=call.layouts[i],
        global_scale=global_scale,
        offsets=offsets,
        k_grouped=offsets is not None and axis == -2,
    )
