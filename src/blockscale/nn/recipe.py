"""Which tensor of a layer is quantized how."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..checks import choose
from ..formats import FP8_BLOCK, Format, formats, get_format

__all__ = ["PRODUCTS", "Recipe", "check_recipe", "check_training_recipe"]

#: The three products of a linear layer.
PRODUCTS = ("fprop", "dgrad", "wgrad")

_ROLES = ("activations", "weights", "gradients")
_FP8_PAIR = "fp8_1x128", "fp8_128x128"  # what FP8_BLOCK stands for: the format, and of weights
_AS_THEY_ARE = "bfloat16"  # of activations: not quantized


@dataclass(frozen=True, repr=False)
class Recipe:
    """How a linear layer multiplies.

    >>> bs.Recipe("mxfp8")  # for training and inference
    Recipe('mxfp8')
    >>> recipe = bs.Recipe("nvfp4", activations="bfloat16")  # for inference, weight-only

    Args:
        format: of activations, weights and gradients, unless one of the next three says otherwise.
            "fp8_block" is FP8 with fp32 scales: "fp8_1x128", and "fp8_128x128" of weights.
        activations, weights, gradients: a format's name, or None for ``format``. For inference
            (:func:`blockscale.quantize_`) ``activations="bfloat16"`` leaves activations as they
            are: weight-only.
        scale_rounding: of every block scale; None is each format's default (``rceil`` for E8M0).
        high_precision: products (``fprop``, ``dgrad``, ``wgrad``) that are not quantized.

    The default is MXFP8 with E4M3 everywhere and scales rounded up, which trains as BF16 does
    (arXiv 2506.08027). Raises ValueError for unknown names and for formats whose blocks do not fit,
    TypeError where ``high_precision`` is no tuple or list.
    """

    format: str = "mxfp8"
    activations: str | None = None
    weights: str | None = None
    gradients: str | None = None
    scale_rounding: str | None = None
    high_precision: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            choose("format", self.format, {**formats, FP8_BLOCK: None})
        if self.format == FP8_BLOCK:
            object.__setattr__(self, "format", _FP8_PAIR[0])
            if self.weights is None:
                object.__setattr__(self, "weights", _FP8_PAIR[1])
        used = {
            role: self.format_of(role)
            for role in _ROLES
            if not (role == "activations" and self.weight_only)
        }
        for one, two in (
            ("activations", "weights"),
            ("gradients", "weights"),
            ("gradients", "activations"),
        ):
            if one in used and two in used and not used[one].multiplies(used[two]):
                raise ValueError(
                    f"{one}, {two}: {used[one].name!r} and {used[two].name!r} have different "
                    "blocks or scales and cannot be multiplied; choose formats of one family"
                )
        if self.scale_rounding is not None:
            for role, fmt in used.items():
                choose(
                    f"scale_rounding (of {role}, {fmt.name!r})",
                    self.scale_rounding,
                    dict.fromkeys(fmt.scale.roundings),
                )
        if not isinstance(self.high_precision, tuple | list):
            raise TypeError(
                f"high_precision: got {self.high_precision!r}; expected a tuple of names"
            )
        object.__setattr__(self, "high_precision", tuple(self.high_precision))
        for product in self.high_precision:
            choose("high_precision", product, dict.fromkeys(PRODUCTS))

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if (self.format, self.weights) == _FP8_PAIR:
            values |= {"format": FP8_BLOCK, "weights": None}
        changed = [
            f"{f.name}={values[f.name]!r}" for f in fields(self)[1:] if values[f.name] != f.default
        ]
        return f"Recipe({', '.join([repr(values['format']), *changed])})"

    @property
    def weight_only(self) -> bool:
        """Whether activations are not quantized."""
        return self.activations == _AS_THEY_ARE

    def format_of(self, role: str) -> Format:
        """The format of ``activations``, ``weights`` or ``gradients``.

        Raises ValueError for activations that are not quantized.
        """
        given = getattr(self, role)
        if role == "activations" and given == _AS_THEY_ARE:
            raise ValueError(
                f"recipe: {self} quantizes weights only, which is for inference: call "
                "blockscale.quantize_(model, recipe), or name a format for activations"
            )
        if given is None:
            return get_format(self.format)
        return get_format(given, role, [_AS_THEY_ARE] if role == "activations" else [])


def check_recipe(recipe: object) -> None:
    """TypeError unless it is a recipe."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: got {type(recipe).__name__}; expected blockscale.Recipe(...)")


def check_training_recipe(recipe: Recipe) -> None:
    """As :func:`check_recipe`, and ValueError where not every operand has a format."""
    check_recipe(recipe)
    for role in _ROLES:
        recipe.format_of(role)
