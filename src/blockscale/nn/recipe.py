"""Which tensor of a layer is quantized how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from ..checks import check_saved, choose
from ..formats import FP8_BLOCK, Format, formats, get_format
from ..hadamard import Hadamard
from ..quantization import PLAIN, Quantization
from .nvfp4 import METHODS
from .nvfp4 import method as method_of
from .operand import Operand

__all__ = [
    "PRODUCTS",
    "PRODUCTS_OF",
    "Recipe",
    "check_inference_recipe",
    "check_recipe",
    "check_training_recipe",
]

#: The three products of a linear layer.
PRODUCTS = ("fprop", "dgrad", "wgrad")

#: What a layer multiplies, and the products that read it along its rows and along its columns.
PRODUCTS_OF = {
    "activations": ("fprop", "wgrad"),
    "weights": ("fprop", "dgrad"),
    "gradients": ("dgrad", "wgrad"),
}
_OPERANDS = tuple(
    f"{role}.{product}" for role, products in PRODUCTS_OF.items() for product in products
)
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
        quantization: what is done beside rounding to nearest: a :class:`Quantization` for
            ``"weights"``, or for the operand of one product, ``"weights.dgrad"``, which goes first.
        overrides: names of layers, in which ``*`` stands for anything, and their recipes; None
            leaves such layers as they are. The first pattern that matches counts. For
            :func:`blockscale.convert` and :func:`blockscale.quantize_`, which know names.

    >>> first = {"model.layers.0.*": None, "*.down_proj": bs.Recipe("mxfp8")}
    >>> recipe = bs.Recipe("nvfp4", overrides=first)
    >>> recipe.of("model.layers.7.mlp.down_proj")
    Recipe('mxfp8')

    The default is MXFP8 with E4M3 everywhere and scales rounded up, which trains as BF16 does
    (arXiv 2506.08027). Raises ValueError for unknown names, for formats whose blocks do not fit,
    for operands of a product that are not transformed alike and for an override that has overrides;
    TypeError where ``high_precision`` is no tuple or list, and ``overrides`` or ``quantization`` no
    mapping of names to recipes, or to what is done.
    """

    format: str = "mxfp8"
    activations: str | None = None
    weights: str | None = None
    gradients: str | None = None
    scale_rounding: str | None = None
    high_precision: tuple[str, ...] = ()
    #: Kept as pairs, so that recipes can be keys.
    overrides: Mapping[str, Recipe | None] | tuple[tuple[str, Recipe | None], ...] = ()
    quantization: Mapping[str, Quantization] | tuple[tuple[str, Quantization], ...] = ()
    #: As compiled graphs hold it.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            choose("format", self.format, {**formats, FP8_BLOCK: None})
        if self.format == FP8_BLOCK:
            object.__setattr__(self, "format", _FP8_PAIR[0])
            if self.weights is None:
                object.__setattr__(self, "weights", _FP8_PAIR[1])
        used = {
            role: self.format_of(role)
            for role in PRODUCTS_OF
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
        object.__setattr__(self, "quantization", _quantization(self.quantization))
        self._check_quantization(used)
        values = {name: value for name, value in self.to_dict().items() if name != "overrides"}
        object.__setattr__(self, "text", _json(values))

    @classmethod
    def nvfp4(
        cls,
        method: str = "nvidia",
        *,
        hadamard: Hadamard | str | None = "default",
        overrides: Mapping[str, Recipe | None] | None = None,
    ) -> Recipe:
        """NVFP4 for training, with what keeps the loss near bf16's.

        >>> recipe = bs.Recipe.nvfp4(overrides={"model.layers.31.*": None})

        Args:
            method: ``"nvidia"``: weights have scales of 16 x 16 elements, so that forward and
                backward multiply by the same; gradients are rounded stochastically; both operands
                of wgrad go through a Hadamard transform of 16 tokens, with signs that were drawn
                once (arXiv 2509.25149). ``"four_over_six"``: the same, and blocks of weights and
                activations take the better of two scales (arXiv 2512.02010). ``"ms_eden"``: blocks
                of the forward do; operands of the backward are transformed in blocks of 128 with
                signs of each step, and their scales corrected (arXiv 2601.22813, Quartet II, which
                makes operands of the backward of those of the forward: here they are made of the
                high-precision ones).
            hadamard: another transform; None leaves it out.
            overrides: as of a recipe. NVIDIA leaves a few layers, most of them the last, in high
                precision: 15 % of a model of 12 billion parameters.

        Raises ValueError for another method.
        """
        return cls("nvfp4", quantization=method_of(method, hadamard), overrides=overrides or ())

    def _check_quantization(self, used: Mapping[str, Format]) -> None:
        """ValueError for squares of blocks that are squares, and for transforms of one operand."""
        of_product: dict[str, list[tuple[str, Quantization]]] = {name: [] for name in PRODUCTS}
        for role, fmt in used.items():
            for product in PRODUCTS_OF[role]:
                found = self._quantization_of(role, product)
                of_product[product].append((f"{role}.{product}", found))
                if found.square and fmt.block[0] > 1:
                    raise ValueError(
                        f"quantization: {role}.{product} has square=True, and blocks of "
                        f"{fmt.name!r} are squares; leave it out"
                    )
                if found.scaling != "amax" and not fmt.has_global_scale:
                    raise ValueError(
                        f"quantization: {role}.{product} has scaling={found.scaling!r}, which "
                        f"{fmt.name!r} has not; leave it out, or choose 'nvfp4'"
                    )
        for product, operands in of_product.items():
            transforms = {each.transform for _, each in operands}
            if len(operands) == 2 and len(transforms) > 1 and product not in self.high_precision:
                names = " and ".join(name for name, _ in operands)
                raise ValueError(
                    f"quantization: {names} have different transforms, and their product would be "
                    "of neither; give both the same hadamard and random_signs, or none"
                )

    def _quantization_of(self, role: str, product: str) -> Quantization:
        given: dict[str, Quantization] = dict(self.quantization)
        return given.get(f"{role}.{product}", given.get(role, PLAIN))

    def operand(self, role: str) -> Operand:
        """How ``activations``, ``weights`` or ``gradients`` are quantized, along both axes.

        Raises ValueError for activations that are not quantized.
        """
        forms = (self._quantization_of(role, product) for product in PRODUCTS_OF[role])
        return Operand(self.format_of(role).name, self.scale_rounding, *forms)

    def _given(self) -> dict[str, Any]:
        """The format, and the other fields that are no defaults."""
        given = [f for f in fields(self) if f.init]
        values = {f.name: getattr(self, f.name) for f in given}
        if (self.format, self.weights) == _FP8_PAIR:
            values |= {"format": FP8_BLOCK, "weights": None}
        values["overrides"] = dict(self._overrides) or ()
        values["quantization"] = dict(self.quantization) or ()
        others = {f.name: values[f.name] for f in given[1:] if values[f.name] != f.default}
        return {"format": values["format"], **others}

    def __repr__(self) -> str:
        for name in METHODS if self.quantization else ():
            if replace(self, overrides=()) == Recipe.nvfp4(name):
                given = [] if name == "nvidia" else [repr(name)]
                given += [f"overrides={dict(self._overrides)!r}"] if self.overrides else []
                return f"Recipe.nvfp4({', '.join(given)})"
        format, *others = self._given().items()
        return f"Recipe({', '.join([repr(format[1]), *(f'{k}={v!r}' for k, v in others)])})"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done to any operand beside rounding to nearest."""
        return not any(each != PLAIN for each in dict(self.quantization).values())

    @property
    def is_random(self) -> bool:
        """Whether an operand depends on a seed."""
        return any(each.is_random for each in dict(self.quantization).values())

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
        if self.quantization:
            values["quantization"] = {
                name: each.to_dict() for name, each in dict(self.quantization).items()
            }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that :meth:`to_dict` gave.

        >>> bs.Recipe.from_dict({"format": "fp8_block"})
        Recipe('fp8_block')

        Raises TypeError for what is no mapping, ValueError for fields that a recipe does not have.
        """
        check_saved(values, (f.name for f in fields(cls) if f.init))
        given = dict(values)
        if isinstance(given.get("overrides"), Mapping):
            given["overrides"] = {
                pattern: cls.from_dict(each) if isinstance(each, Mapping) else each
                for pattern, each in given["overrides"].items()
            }
        if isinstance(given.get("quantization"), Mapping):
            given["quantization"] = {
                name: Quantization.from_dict(each) if isinstance(each, Mapping) else each
                for name, each in given["quantization"].items()
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
    what = "names of layers and recipes, as {'*.down_proj': blockscale.Recipe('mxfp8')}"
    found = _as_dict("overrides", overrides, what)
    for pattern, recipe in found.items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"overrides: got the name {pattern!r}; expected a string")
        if recipe is not None:
            check_recipe(recipe, f"overrides[{pattern!r}]")
    return tuple(found.items())


def _as_dict(name: str, given: Any, what: str) -> dict[Any, Any]:
    """TypeError unless argument ``name`` is a dict, or its pairs."""
    try:
        return dict(given)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {type(given).__name__}; expected a dict of {what}") from None


def _json(value: Any) -> str:
    """By the json module's rules, of names and numbers: torch.compile, which may see a recipe made,
    cannot trace that module."""
    if isinstance(value, dict):
        return "{" + ", ".join([f'"{name}": {_json(each)}' for name, each in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join([_json(each) for each in value]) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _quantization(given: Any) -> tuple[tuple[str, Quantization], ...]:
    """Operands and what is done to them, checked."""
    what = "operands, as {'weights': blockscale.Quantization(square=True)}"
    found = _as_dict("quantization", given, what)
    for name, each in found.items():
        choose("quantization", name, dict.fromkeys((*PRODUCTS_OF, *_OPERANDS)))
        if not isinstance(each, Quantization):
            raise TypeError(
                f"quantization[{name!r}]: got {type(each).__name__}; expected "
                "blockscale.Quantization(...)"
            )
    return tuple(sorted(found.items()))


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
    for role in PRODUCTS_OF:
        recipe.format_of(role)


def check_inference_recipe(recipe: Recipe) -> None:
    """As :func:`check_recipe`, and ValueError where fprop does more than round to nearest, but for
    squares of weights."""
    check_recipe(recipe)
    weights = recipe.operand("weights").rows
    others = () if recipe.weight_only else (recipe.operand("activations").rows,)
    if any(each.is_random or each.hadamard is not None for each in (weights, *others)):
        raise ValueError(
            f"recipe: {recipe} rounds operands of fprop stochastically, or transforms them, which "
            "is for training; pass one that rounds these to nearest"
        )
