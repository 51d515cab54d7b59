"""ScaledTensor: quantized data, its block scales and what they mean, as one torch.Tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .formats import Format, choose, get_format
from .layouts import Grouped, Layout, as_bytes, get_layout
from .remember import remembered

__all__ = ["RULES", "ScaledTensor", "check_axis", "check_offsets"]

AXES = {"-1": -1, "-2": -2}

_INNER = {"data": "qdata", "scale": "qscale"}  # arguments and the attributes that keep them
_OUTER = {attribute: name for name, attribute in _INNER.items()}

#: What each aten operation does to a ScaledTensor; filled by tensor_rules.
RULES: dict[Any, Callable[..., Any]] = {}


def check_axis(axis: int) -> int:
    """-1 or -2; anything else is a ValueError."""
    return choose("axis (of the contraction, counted from the end)", str(axis), AXES)


def check_offsets(offsets: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``offsets`` are ascending int32 ends of groups, at most ``rows``.

    Their values are looked at only on a CPU: elsewhere that would wait for the device.
    """
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise TypeError("offsets: expected an int32 tensor of one dimension, the end of each group")
    if not len(offsets):
        raise ValueError("offsets: is empty; expected the end of at least one group")
    if offsets.device != device:
        raise ValueError(f"offsets: is on {offsets.device}, the data on {device}; move it there")
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        return
    ends = [0, *offsets.tolist()]
    if any(end < start for start, end in pairwise(ends)) or ends[-1] > rows:
        raise ValueError(f"offsets: got {ends[1:]}; expected ascending ends, at most {rows}")


class ScaledTensor(torch.Tensor):
    """A tensor of ``shape`` and ``dtype`` whose values are ``data * block_scale * global_scale``.

    Made by :func:`blockscale.quantize`; the constructor takes finished parts and checks them.

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
        global_scale: fp32 scalar that dequantizes; given exactly where the format has one.
        offsets: int32 (groups,), the end of each expert's rows. With ``k_grouped`` they cut the
            contraction and blocks start anew in each group; else they cut the other axis, and
            every layout but compact starts each group on a 128-row tile of scales.

    It moves, copies, saves, loads, compiles, reshapes in front of the contraction, slices along
    whole blocks and transposes together with its contraction (``mT``). All else would change
    values behind their scales and raises ValueError or TypeError.
    """

    axis: int
    format_name: str
    layout_name: str
    qdata: Tensor
    qscale: Tensor
    global_scale: Tensor | None
    offsets: Tensor | None
    k_grouped: bool

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
        strides = _strides(shape, data)
        self = torch.Tensor._make_wrapper_subclass(  # by position: by name it takes longer
            cls, shape, strides, None, None, dtype, torch.strided, data.device
        )
        self.qdata = data
        # as bytes: torch's compiler knows no float8_e8m0fnu
        self.qscale = scale if scale.dtype is torch.uint8 else as_bytes(scale)
        self.global_scale = global_scale
        self.offsets = offsets
        # names, because torch.compile traces through strings only
        self.format_name = get_format(format).name
        self.layout_name = get_layout(layout).name
        self.axis = check_axis(axis)
        self.k_grouped = k_grouped
        self._check(tuple(shape), scale.dtype)
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The stored elements, see the class. In compiled code: ``qdata`` (``data`` is torch's)."""
        return self.qdata

    @property
    def scale(self) -> Tensor:
        """The stored scales, see the class. ``qscale`` is the same, one-byte floats as uint8."""
        return self.qscale.view(self.layout.stored_dtype(self.format.scale.dtype))

    @property
    def mT(self) -> ScaledTensor:  # type: ignore[override]
        """The transposed matrix (of each batch); the contraction moves along, no byte changes."""
        return self.transpose(-2, -1)  # type: ignore[return-value]

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Where the scales lie. (Of a plain tensor, torch would say strided here.)"""
        return get_layout(self.layout_name)

    @property
    def format(self) -> Format:
        """What its elements and scales are."""
        return get_format(self.format_name)

    # --- what it is -------------------------------------------------------------------------------

    def _check(self, shape: tuple[int, ...], scale_dtype: torch.dtype) -> None:
        name, data, scale = self.format_name, self.qdata, self.qscale
        scalar, offsets = self.global_scale, self.offsets
        groups = None if offsets is None else offsets.shape[0]
        want = _stored(
            name, self.layout_name, shape, self.axis, groups, self.k_grouped, scalar is not None
        )
        if scalar is not None and (scalar.dtype != torch.float32 or scalar.numel() != 1):
            raise ValueError("global_scale: expected an fp32 scalar tensor")
        if data.shape != want.data or data.dtype != want.data_dtype:
            raise ValueError(
                f"data: got {tuple(data.shape)} {data.dtype}; {name!r} stores "
                f"{shape} along axis {self.axis} as {want.data} {want.data_dtype}"
            )
        if scale.shape != want.scale or scale_dtype not in want.scale_dtypes:
            raise ValueError(
                f"scale: got {tuple(scale.shape)} {scale_dtype}; {name!r} in layout "
                f"{self.layout_name!r} for {shape} along axis {self.axis} is {want.scale} "
                f"{want.scale_dtypes[0]}"
            )
        device = data.device
        for part, tensor in (("scale", scale), ("global_scale", scalar), ("offsets", offsets)):
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{part}: is on {tensor.device}, data on {device}; move it there")

    @property
    def _k_groups(self) -> int:
        return self.offsets.shape[0] if self.k_grouped and self.offsets is not None else 0

    @property
    def compact_shape(self) -> tuple[int, ...]:
        """Shape of the scales in the compact layout."""
        return self.format.scale_shape(self.shape, self.axis, self._k_groups)

    @property
    def _matrix_shape(self) -> tuple[int, int]:
        """(rows, blocks) of the scales as layouts see them, the contraction last."""
        rows, blocks = self.compact_shape[-2:]
        return (rows, blocks) if self.axis == -1 else (blocks, rows)

    def compact_scale(self) -> Tensor:
        """The scales in the compact layout, in ``format.scale.dtype``."""
        return self.compact_bytes().view(self.format.scale.dtype)

    def compact_bytes(self) -> Tensor:
        """The scales in the compact layout, one-byte floats as uint8: what operations take."""
        if self.layout_name == "compact":
            return self.qscale
        dtype = torch.uint8 if self.format.scale.nbytes == 1 else self.format.scale.dtype
        if self.offsets is not None:
            matrix = Grouped(self.layout).unswizzle(
                self.qscale, self._matrix_shape, dtype, self.offsets
            )
        else:
            matrix = self.layout.unswizzle(self.qscale, self._matrix_shape, dtype)
        return matrix if self.axis == -1 else matrix.mT

    def to_layout(self, layout: str | Layout) -> ScaledTensor:
        """The same tensor with its scales stored in another layout; data is shared.

        Raises ValueError for an unknown layout, one that cannot hold these scales (by size, or
        because there are leading dimensions or groups along the contraction).
        """
        layout = get_layout(layout)
        if layout == self.layout:
            return self
        scale = self.compact_bytes()
        if layout.name != "compact":
            if self.dim() != 2 or self.k_grouped:
                raise ValueError(
                    f"layout: {layout.name!r} stores the scales of one matrix; this tensor has "
                    f"shape {tuple(self.shape)}{' and grouped blocks' * self.k_grouped}: "
                    "flatten leading dimensions before quantizing, or keep 'compact'"
                )
            matrix = scale if self.axis == -1 else scale.mT
            if self.offsets is not None:
                scale = Grouped(layout).swizzle(matrix, self.offsets)
            else:
                scale = layout.swizzle(matrix)
        return self._with(scale=scale, layout=layout)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values: fp32 products rounded once to ``dtype`` (default: the original's).

        Raises TypeError where ``dtype`` is not float32, bfloat16, float16 or float64.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise TypeError(
                f"dtype: got {dtype}; choose torch.float32, bfloat16, float16 or float64"
            )
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

    def share_memory_(self) -> ScaledTensor:
        """Move the parts to shared memory; the wrapper has no storage of its own."""
        for part in self._parts().values():
            part.share_memory_()
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        grouped = f", groups={len(self.offsets)}" if self.offsets is not None else ""
        return (
            f"ScaledTensor({self.format.name}, shape={tuple(self.shape)}, axis={self.axis}, "
            f"layout={self.layout.name}, dtype={self.dtype}, device={self.device}{grouped})"
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
        return repr(sorted((k, str(v)) for k, v in self._meta().items()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parts = self._parts()
        parts["data"] = as_bytes(parts["data"])  # torch 2.13 cannot unpickle float8
        return _rebuild, (parts, self._meta(), tuple(self.shape))

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
            raise ValueError(
                f"{func}: a ScaledTensor cannot do this, its values would change behind their "
                "scales; call .dequantize() first (and blockscale.quantize the result), or "
                "blockscale.gemm to multiply"
            )
        return rule(*args, **(kwargs or {}))


def _rebuild(parts: dict[str, Tensor], meta: dict[str, Any], shape: Sequence[int]) -> ScaledTensor:
    data = parts["data"].view(get_format(meta["format"]).element.dtype)
    return ScaledTensor(**{**parts, **meta, "data": data}, shape=shape)


torch.serialization.add_safe_globals([ScaledTensor, _rebuild])


class _Stored(NamedTuple):
    """Shapes and dtypes of the parts of a ScaledTensor."""

    data: tuple[int, ...]
    data_dtype: torch.dtype
    scale: tuple[int, ...]
    scale_dtypes: tuple[torch.dtype, ...]  # that of the layout; one-byte scales as uint8 too


@remembered
def _stored(
    format: str,
    layout: str,
    shape: tuple[int, ...],
    axis: int,
    groups: int | None,
    k_grouped: bool,
    has_global_scale: bool,
) -> _Stored:
    """What stores a tensor of ``shape``; ValueError where nothing does."""
    fmt, where = get_format(format), get_layout(layout)
    if len(shape) < -axis:
        raise ValueError(f"axis: got {axis} for {len(shape)} dimension(s)")
    if fmt.has_global_scale != has_global_scale:
        verb = "needs" if fmt.has_global_scale else "has no"
        raise ValueError(f"global_scale: format {format!r} {verb} global_scale")
    if layout != "compact" and (len(shape) != 2 or k_grouped):
        raise ValueError(
            f"layout: {layout!r} stores the scales of one matrix; with leading "
            "dimensions, or groups along the contraction, scales are compact"
        )
    k_groups = groups if groups is not None and k_grouped else 0
    scale = fmt.scale_shape(shape, axis, k_groups)
    if layout != "compact":
        matrix = (scale[0], scale[1]) if axis == -1 else (scale[1], scale[0])
        if groups is None:
            scale = where.stored_shape(matrix)
        else:
            scale = Grouped(where).stored_shape(matrix, groups)
    dtype = where.stored_dtype(fmt.scale.dtype)
    return _Stored(
        fmt.data_shape(shape, axis, k_groups),
        fmt.element.dtype,
        scale,
        (dtype, torch.uint8) if dtype.itemsize == 1 else (dtype,),
    )


def _strides(shape: Sequence[int], data: Tensor) -> list[int] | None:
    """Strides of a dense tensor whose fastest dimension is that of the data; None: the last."""
    if len(shape) < 2 or data.stride(-1) == 1 or data.stride(-2) != 1:
        return None
    strides, step = [0] * len(shape), 1
    for dim in (len(shape) - 2, len(shape) - 1, *reversed(range(len(shape) - 2))):
        strides[dim] = step
        step = step * shape[dim]
    return strides
