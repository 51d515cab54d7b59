"""ScaledTensor: quantized data, its block scales and what they mean, as one torch.Tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import check_axis
from .formats import Format, get_format
from .layouts import Layout, get_layout, swizzle_scale, unswizzle_scale
from .memory import as_bytes
from .stored import check_parts, strides_like
from .tensor_checks import check_is_tensor, check_shape, check_value_dtype
from .tensor_refusals import refusal
from .watching import is_transformed, unwatched

__all__ = ["RULES", "ScaledTensor", "transposed"]

_INNER = {"data": "qdata", "scale": "qscale"}  # arguments and the attributes that keep them
_OUTER = {attribute: name for name, attribute in _INNER.items()}

#: What each aten operation does to a ScaledTensor; filled by tensor_rules and tensor_join.
RULES: dict[Any, Callable[..., Any]] = {}


class ScaledTensor(torch.Tensor):
    """A tensor of ``shape`` and ``dtype`` whose values are ``data * block_scale * global_scale``.

    Made by :func:`blockscale.quantize`; the constructor takes finished parts and checks them.

    >>> q = bs.quantize(torch.randn(256, 512, dtype=torch.bfloat16), "mxfp8")
    >>> q
    ScaledTensor(mxfp8, shape=(256, 512), axis=-1, layout=compact, dtype=torch.bfloat16, device=cpu)
    >>> x = q.dequantize()
    >>> same = bs.ScaledTensor(q.data, q.scale, format="mxfp8", shape=(256, 512))

    Args:
        data: ``format.data_shape(shape, axis)`` in ``format.element.dtype`` (uint8 if packed);
            along ``axis`` it is padded with zeros to whole blocks.
        scale: as ``layout`` stores it. Compact: ``format.scale_shape(shape, axis)``, each scale in
            the position of its block.
        format: name or :class:`Format`.
        shape: of the tensor that was quantized.
        axis: the contraction: -1 (blocks along rows) or -2 (blocks along columns).
        dtype: of the tensor that was quantized, and of ``dequantize()``.
        layout: name or :class:`Layout` of ``scale``.
        global_scale: fp32 scalar that dequantizes, or ``shape[:-2]``, one for each matrix of a
            batch; given exactly where the format has one.
        offsets: int32 (groups,), the end of each expert's rows. With ``k_grouped`` they cut the
            contraction, blocks start anew in each group, and groups are moved apart to tiles of
            128; else they cut the other axis, and every layout but compact starts each group on a
            128-row tile of scales.

    It moves, copies, saves, loads, compiles, reshapes in front of the contraction, transposes
    together with its contraction (``mT``), and along whole blocks slices, splits and joins
    (``torch.cat``; ``torch.stack`` in front of the matrix): each matrix keeps its global scale,
    unless all share one tensor of it, and parts of one matrix must have the same. All else needs
    values, which ``dequantize()`` gives, and raises ValueError or TypeError.

    ``q.data`` is the elements, alone. Where ``q`` is a torch.nn.Parameter, ``q.data`` is what torch
    means by it: ``q.detach()``, with scales, of the same memory. ``q.qdata`` is always the elements
    (take it in compiled code, too).

    Raises ValueError where the parts do not fit ``format``, ``shape``, ``axis`` and ``layout``, and
    for unknown names; TypeError for parts, a ``shape`` or a ``dtype`` that are none.
    """

    axis: int
    format_name: str
    layout_name: str
    qdata: Tensor
    qscale: Tensor
    global_scale: Tensor | None
    offsets: Tensor | None
    k_grouped: bool

    # kept for calls to come
    _operand: Any = None  # of products, by gemm_launch
    _transposed: tuple[ScaledTensor, Tensor, Tensor] | None = None  # mT, and what it was made of

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        data: Tensor,
        scale: Tensor,
        *,
        format: str | Format,
        shape: Sequence[int],
        axis: int = -1,
        dtype: torch.dtype = torch.bfloat16,
        layout: str | Layout = "compact",
        global_scale: Tensor | None = None,
        offsets: Tensor | None = None,
        k_grouped: bool = False,
    ) -> ScaledTensor:
        check_is_tensor("data", data)
        check_is_tensor("scale", scale)
        check_shape(shape)
        check_value_dtype(dtype)
        self = _wrap(
            cls,
            (data, scale if scale.dtype is torch.uint8 else as_bytes(scale), global_scale, offsets),
            get_format(format).name,
            get_layout(layout).name,
            check_axis(axis),
            k_grouped,
            shape,
            dtype,
        )
        check_parts(self, tuple(shape), scale.dtype)
        return self

    @property
    def data(self) -> Tensor:
        """The stored elements, ``qdata``; of a parameter what torch means: the detached tensor."""
        return self.detach() if isinstance(self, torch.nn.Parameter) else self.qdata

    @data.setter
    def data(self, value: Any) -> None:
        raise TypeError(
            f"data: cannot be set, scales would stay behind; {self} can be overwritten by "
            ".copy_(another of its kind), and a layer takes another parameter: layer.weight = "
            "torch.nn.Parameter(q, requires_grad=False)"
        )

    @property
    def scale(self) -> Tensor:
        """The stored scales, see the class. ``qscale`` is the same, one-byte floats as uint8."""
        return self.qscale.view(self.scale_layout.stored_dtype(self.format.scale.dtype))

    @property
    def mT(self) -> ScaledTensor:  # type: ignore[override]
        """The transposed matrix (of each batch); the contraction moves along, no byte changes."""
        if torch.compiler.is_dynamo_compiling() or self.requires_grad or self.dim() < 2:
            return self.transpose(-2, -1)  # type: ignore[return-value]  # may say why not
        if not unwatched():
            # export and torch.func take operations on the parts, not on the whole
            parts = torch.compiler.is_compiling() or is_transformed()
            return transposed(self) if parts else self.transpose(-2, -1)  # type: ignore[return-value]
        kept = self._transposed
        if kept is not None:
            made, data, scale = kept
            if (
                data is self.qdata
                and scale is self.qscale
                and made.qdata.data_ptr() == data.data_ptr()  # not given other memory since
                and made.qscale.data_ptr() == scale.data_ptr()
                and made.global_scale is self.global_scale
                and made.offsets is self.offsets
                and not made.requires_grad
            ):
                return made
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # it may be asked for again outside
                made = transposed(self)
        else:
            made = transposed(self)
        self._transposed = made, self.qdata, self.qscale
        return made

    @property
    def T(self) -> ScaledTensor:  # type: ignore[override]
        """``mT`` of a matrix."""
        if self.dim() != 2:
            raise TypeError(f"T: {self} is no matrix; use .mT, which turns each matrix of a batch")
        return self.mT

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """What is stored: elements, scales, global scale and offsets."""
        return sum(part.nbytes for part in self._parts().values())

    @property
    def scale_layout(self) -> Layout:
        """Where the scales lie. (``layout`` is torch's, strided as of any dense tensor.)"""
        return get_layout(self.layout_name)

    @property
    def format(self) -> Format:
        """What its elements and scales are."""
        return get_format(self.format_name)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def _k_groups(self) -> int:
        return self.offsets.shape[0] if self.k_grouped and self.offsets is not None else 0

    @property
    def _of_rows(self) -> Tensor | None:
        """Offsets, if they cut what is not contracted."""
        return None if self.k_grouped else self.offsets

    @property
    def groups_apart(self) -> bool:
        """Whether the data has groups along the contraction moved apart."""
        stored = self.qdata.shape[self.axis]
        return self.k_grouped and self.format.element.elements(stored) != self.shape[self.axis]

    @property
    def compact_shape(self) -> tuple[int, ...]:
        """Shape of the scales in the compact layout."""
        return self.format.scale_shape(self.shape, self.axis, self._k_groups)

    def compact_scale(self) -> Tensor:
        """The scales in the compact layout, in ``format.scale.dtype``."""
        return self.compact_bytes().view(self.format.scale.dtype)

    def compact_bytes(self) -> Tensor:
        """The scales in the compact layout, one-byte floats as uint8: what operations take."""
        if self.layout_name == "compact":
            return self.qscale
        dtype = torch.uint8 if self.format.scale.nbytes == 1 else self.format.scale.dtype
        return unswizzle_scale(
            self.qscale, self.axis, self.scale_layout, self.compact_shape, dtype, self._of_rows
        )

    def to_layout(self, layout: str | Layout) -> ScaledTensor:
        """The same tensor with its scales stored in another layout; data is shared.

        Raises ValueError for an unknown layout, one that cannot hold these scales (by size, or
        because there are leading dimensions).
        """
        layout = get_layout(layout)
        if layout == self.scale_layout:
            return self
        if layout.name != "compact" and self.dim() != 2:
            raise ValueError(
                f"layout: {layout.name!r} stores the scales of one matrix; this tensor has shape "
                f"{tuple(self.shape)}: flatten leading dimensions before quantizing, or keep "
                "'compact'"
            )
        scale = swizzle_scale(self.compact_bytes(), self.axis, layout, self._of_rows)
        return self._with(scale=scale, layout=layout)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values: fp32 products rounded once to ``dtype`` (default: the original's).

        Raises TypeError where ``dtype`` is not float32, bfloat16, float16 or float64.
        """
        dtype = self.dtype if dtype is None else dtype
        check_value_dtype(dtype)
        return torch.ops.blockscale.dequantize(
            as_bytes(self.qdata),
            self.compact_bytes(),
            self.format.name,
            self.shape,
            self.axis,
            self.global_scale,
            self.offsets if self.k_grouped else None,
            dtype,
        )

    def storage(self) -> Any:
        """Refused; safetensors' own save_file asks for it."""
        raise TypeError(
            f"storage: {self} has none of its own, but elements and scales; write it by "
            "blockscale.checkpoint.save_file, or take .qdata and .qscale"
        )

    def share_memory_(self) -> ScaledTensor:
        """Move the parts to shared memory; the wrapper has no storage of its own."""
        for part in self._parts().values():
            part.share_memory_()
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        grouped = f", groups={len(self.offsets)}" if self.offsets is not None else ""
        return (
            f"ScaledTensor({self.format.name}, shape={tuple(self.shape)}, axis={self.axis}, "
            f"layout={self.layout_name}, dtype={self.dtype}, device={self.device}{grouped})"
        )

    # --- parts, for torch.compile and for copies --------------------------------------------------

    def _meta(self) -> dict[str, Any]:
        return {
            "format": self.format_name,
            "axis": self.axis,
            "dtype": self.dtype,
            "layout": self.layout_name,
            "k_grouped": self.k_grouped,
        }

    def _parts(self) -> dict[str, Tensor]:
        parts = {
            "data": self.qdata,
            "scale": self.qscale,
            "global_scale": self.global_scale,
            "offsets": self.offsets,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _with(self, **changes: Any) -> ScaledTensor:
        return ScaledTensor(**{**self._parts(), **self._meta(), "shape": self.shape, **changes})

    def _map(self, fn: Callable[[Tensor], Tensor]) -> ScaledTensor:
        return self._with(**{name: fn(part) for name, part in self._parts().items()})

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = [_INNER.get(name, name) for name in self._parts()]
        return names, self._meta()

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: dict[str, Any], shape: torch.Size, stride: tuple[int, ...]
    ) -> ScaledTensor:
        parts = {_OUTER.get(name, name): part for name, part in inner.items()}
        return ScaledTensor(**{**parts, **meta}, shape=shape)

    def _stable_hash_for_caching(self) -> str:
        """All that a graph depends on: torch runs one that it has cached where this is the same."""
        parts = [(name, x.shape, x.stride(), x.dtype) for name, x in self._parts().items()]
        return repr((self._meta(), self.shape, self.device, self.requires_grad, parts))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parts = self._parts()
        parts["data"] = as_bytes(parts["data"])  # torch 2.13 cannot unpickle float8
        parameter = self.requires_grad if isinstance(self, torch.nn.Parameter) else None
        return _rebuild, (parts, self._meta(), tuple(self.shape), parameter)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = RULES.get(func)
        if rule is None:
            # not a TypeError: Python's operators would swallow the sentence
            raise ValueError(refusal(func))
        if func.is_view and not args[0].is_inference() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # torch wants views of normal tensors to be normal
                return rule(*args, **(kwargs or {}))
        return rule(*args, **(kwargs or {}))


def _wrap(
    cls: type[ScaledTensor],
    parts: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    format_name: str,
    layout_name: str,
    axis: int,
    k_grouped: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> ScaledTensor:
    """A ScaledTensor of parts that are known to fit: data, scale, global scale and offsets."""
    data, scale, global_scale, offsets = parts
    strides = strides_like(shape, data)
    self = torch.Tensor._make_wrapper_subclass(  # by position: by name it takes longer
        cls, shape, strides, None, None, dtype, torch.strided, data.device
    )
    self.qdata = data
    self.qscale = scale  # as bytes: torch's compiler knows no float8_e8m0fnu
    self.global_scale = global_scale
    self.offsets = offsets
    self.format_name = format_name  # names, because torch.compile traces through strings only
    self.layout_name = layout_name
    self.axis = axis
    self.k_grouped = k_grouped
    return self


def transposed(q: ScaledTensor) -> ScaledTensor:
    """``q.mT``; what fits stays fit."""
    *lead, rows, columns = q.shape
    scale = q.qscale.mT if q.layout_name == "compact" else q.qscale
    return _wrap(
        ScaledTensor,
        (q.qdata.mT, scale, q.global_scale, q.offsets),
        q.format_name,
        q.layout_name,
        -3 - q.axis,
        q.k_grouped,
        (*lead, columns, rows),
        q.dtype,
    )


def _rebuild(
    parts: dict[str, Tensor],
    meta: dict[str, Any],
    shape: Sequence[int],
    parameter: bool | None = None,
) -> Any:
    """``parameter``: whether it requires gradients, of a parameter; None of other tensors."""
    data = parts["data"].view(get_format(meta["format"]).element.dtype)
    made = ScaledTensor(**{**parts, **meta, "data": data}, shape=shape)
    return made if parameter is None else torch.nn.Parameter(made, requires_grad=parameter)


torch.serialization.add_safe_globals([ScaledTensor, _rebuild])
