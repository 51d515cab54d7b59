"""Which tensor of a layer is quantized how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

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
        overrides: names of layers, in which ``*`` stands for anything, and their recipes; None
            leaves such layers as they are. The first pattern that matches counts. For
            :func:`blockscale.convert` and :func:`blockscale.quantize_`, which know names.

    >>> first = {"model.layers.0.*": None, "*.down_proj": bs.Recipe("mxfp8")}
    >>> recipe = bs.Recipe("nvfp4", overrides=first)
    >>> recipe.of("model.layers.7.mlp.down_proj")
    Recipe('mxfp8')

    The default is MXFP8 with E4M3 everywhere and scales rounded up, which trains as BF16 does
    (arXiv 2506.08027). Raises ValueError for unknown names, for formats whose blocks do not fit and
    for an override that has overrides; TypeError where ``high_precision`` is no tuple or list, and
    ``overrides`` no mapping of names to recipes.
    """

    format: str = "mxfp8"
    activations: str | None = None
    weights: str | None = None
    gradients: str | None = None
    scale_rounding: str | None = None
    high_precision: tuple[str, ...] = ()
    #: Kept as pairs, so that recipes can be keys.
    overrides: Mapping[str, Recipe | None] | tuple[tuple[str, Recipe | None], ...] = ()

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
        object.__setattr__(self, "overrides", _pairs(self.overrides))

    def _given(self) -> dict[str, Any]:
        """The format, and the other fields that are no defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if (self.format, self.weights) == _FP8_PAIR:
            values |= {"format": FP8_BLOCK, "weights": None}
        values["overrides"] = dict(self._overrides) or ()
        others = {f.name: values[f.name] for f in fields(self)[1:] if values[f.name] != f.default}
        return {"format": values["format"], **others}

    def __repr__(self) -> str:
        format, *others = self._given().items()
        return f"Recipe({', '.join([repr(format[1]), *(f'{k}={v!r}' for k, v in others)])})"

    @property
    def weight_only(self) -> bool:
        """Whether activations are not quantized."""
        return self.activations == _AS_THEY_ARE

    def pattern_of(self, name: str) -> str | None:
        """The override's that a layer of this name has; None: it has none."""
        return next((p for p, _ in self._overrides if fnmatchcase(name, p)), None)

    def of(self, name: str) -> Recipe | None:
        """The recipe of a layer of this name, without overrides; None of one that is left alone."""
        pattern = self.pattern_of(name)
        if pattern is not None:
            return dict(self._overrides)[pattern]
        return replace(self, overrides=()) if self.overrides else self

    @property
    def _overrides(self) -> tuple[tuple[str, Recipe | None], ...]:
        assert isinstance(self.overrides, tuple)
        return self.overrides

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, of what is not the default: :meth:`from_dict` makes the recipe again.

        >>> bs.Recipe("mxfp8", high_precision=("wgrad",)).to_dict()
        {'format': 'mxfp8', 'high_precision': ['wgrad']}
        """
        values = self._given()
        if isinstance(self.format, Format):
            values["format"] = self.format.name
        if self.high_precision:
            values["high_precision"] = list(self.high_precision)
        if self.overrides:
            values["overrides"] = {
                pattern: None if recipe is None else recipe.to_dict()
                for pattern, recipe in self._overrides
            }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that :meth:`to_dict` gave.

        >>> bs.Recipe.from_dict({"format": "fp8_block"})
        Recipe('fp8_block')

        Raises TypeError for what is no mapping, ValueError for fields that a recipe does not have.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values: got {type(values).__name__}; expected what to_dict() gives")
        known = [f.name for f in fields(cls)]
        for name in values:
            choose("values", name, dict.fromkeys(known))
        given = dict(values)
        if isinstance(given.get("overrides"), Mapping):
            given["overrides"] = {
                pattern: cls.from_dict(each) if isinstance(each, Mapping) else each
                for pattern, each in given["overrides"].items()
            }
        return cls(**given)

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


def _pairs(overrides: Any) -> tuple[tuple[str, Recipe | None], ...]:
    """Patterns and recipes, checked."""
    try:
        found = dict(overrides)
    except (TypeError, ValueError):
        raise TypeError(
            f"overrides: got {type(overrides).__name__}; expected a dict of names of layers and "
            "recipes, as {'*.down_proj': blockscale.Recipe('mxfp8')}"
        ) from None
    for pattern, recipe in found.items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"overrides: got the name {pattern!r}; expected a string")
        if recipe is not None:
            check_recipe(recipe, f"overrides[{pattern!r}]")
    return tuple(found.items())


def check_recipe(recipe: object, name: str = "recipe", *, knows_names: bool = False) -> None:
    """TypeError unless argument ``name`` is a recipe; ValueError of one with overrides, unless
    whoever takes it knows names of layers."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{name}: got {type(recipe).__name__}; expected blockscale.Recipe(...)")
    if recipe.overrides and not knows_names:
        raise ValueError(
            f"{name}: has overrides, which are of names of layers; pass it to blockscale.convert "
            "or blockscale.quantize_, or recipe.of(name) here"
        )


def check_training_recipe(recipe: Recipe, *, knows_names: bool = False) -> None:
    """As :func:`check_recipe`, and ValueError where not every operand has a format."""
    check_recipe(recipe, knows_names=knows_names)
    for _, override in recipe._overrides:
        if override is not None:
            check_training_recipe(override)
    for role in _ROLES:
        recipe.format_of(role)
