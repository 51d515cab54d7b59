"""Which of our activations experts of transformers have between their products, by its values.

What was found is kept on the module, as plain values: a compiler that guarded a table of all
modules would compile anew for each other model, and a file of a module needs nothing of ours.
"""

from __future__ import annotations

import math
from dataclasses import astuple
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .gated import GatedActivation

__all__ = ["INPUT_SCALES", "activation_of", "forget_activation"]

_KEPT = "_blockscale_activation"
_ALPHAS = ("alpha", "swiglu_alpha")
_LIMITS = ("limit", "swiglu_limit")
_PARAMETERS = frozenset({"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"})
_MODULES = frozenset({"act_fn", "parametrizations"})
#: Buffers of experts that hold quantized stacks: global scales of what both products read.
INPUT_SCALES = "up_input_scale", "down_input_scale"
#: What a module without values holds; transformers marks all modules of a model that it loads.
_BARE = frozenset({*vars(torch.nn.Module()), "inplace", "_is_hf_initialized"})


def activation_of(module: Any, device: torch.device) -> GatedActivation | None:
    """Which of ours has the values of the module's; None: none has, there is more between the
    products, or what is there may change unseen. Found again where ``act_fn``, a limit or an alpha
    was replaced."""
    if torch.compiler.is_compiling():  # whose guards see to that
        return _found(module, device)
    held = module.__dict__
    act = held.get("act_fn") or held["_modules"].get("act_fn")
    state = act, *[held.get(name) for name in _ALPHAS + _LIMITS]
    kept = held.get(_KEPT)
    if kept is None or not all(map(is_, kept[0], state)):
        found = _found(module, device)
        kept = held[_KEPT] = state, None if found is None else astuple(found)
    return None if kept[1] is None else GatedActivation(*kept[1])


def forget_activation(module: torch.nn.Module) -> None:
    """Leave nothing on a module that is no longer ours."""
    module.__dict__.pop(_KEPT, None)


def _found(module: Any, device: torch.device) -> GatedActivation | None:
    """A compiler traces this, and takes what marked functions give for constants."""
    given = [[getattr(module, name, None) for name in names] for names in (_ALPHAS, _LIMITS)]
    if not _is_known(module, given):
        return None
    alphas, limits = ([float(each) for each in numbers if each is not None] for numbers in given)
    limits = [each for each in limits if each < math.inf]
    interleaved = not module.is_concatenated
    if device.type == "meta":  # which has no values
        device = torch.device("cpu")
    # a method: of a function's arguments, a compiler would guard which module it is
    values = _apply_gate.__get__(module)(_probe(interleaved, device))
    # in hexadecimal: a compiler takes floats for variables
    texts = [each.hex() for each in (*alphas, *limits)]
    which = _first_alike(values, interleaved, len(alphas), *texts)
    return None if which is None else _candidates(alphas, limits, interleaved)[which]


def _is_known(module: Any, given: list[list[Any]]) -> bool:
    """Whether what is between the products is a gated activation, and nothing may change it but
    ``act_fn`` and the numbers that are given."""
    act = getattr(module, "act_fn", None)
    return (
        module.has_gate
        and not getattr(module, "has_post_expert_norm", False)
        and module._parameters.keys() <= _PARAMETERS
        and module._modules.keys() <= _MODULES
        and module._buffers.keys() <= {*INPUT_SCALES}
        and (not isinstance(act, torch.nn.Module) or _is_bare(act))
        and all(each is None or isinstance(each, int | float) for each in given[0] + given[1])
    )


def _is_bare(act: torch.nn.Module) -> bool:
    """Whether it holds nothing that could change what it computes."""
    return vars(act).keys() <= _BARE and not (act._parameters or act._buffers or act._modules)


def _candidates(
    alphas: list[float], limits: list[float], interleaved: bool
) -> list[GatedActivation]:
    """Those with the module's own numbers first: one that no value of the trial reaches is kept."""
    return [
        GatedActivation(alpha, limit, shift, interleaved)
        for alpha in (*alphas, 1.0)
        for limit in (*limits, None)
        for shift in (0.0, 1.0)
    ]


def _apply_gate(module: Any, h: Tensor) -> Any:
    with _disable_current_modes():  # which have no values to compare
        return module._apply_gate(h)


def _probe(interleaved: bool, device: torch.device) -> Tensor:
    """Gates and ups of either sign in all pairs, those of models and far beyond, where any limit
    shows."""
    with _disable_current_modes():
        near = torch.linspace(0, 30, 31, device=device, dtype=torch.float32)
        far = torch.logspace(-3, 18, 43, device=device, dtype=torch.float32)
        values = torch.cat((near, -near, far, -far))
        gate, up = torch.meshgrid(values, values, indexing="ij")
        return torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)


def _first_alike(values: Tensor, interleaved: bool, split: int, *numbers: str) -> int | None:
    """Which of the candidates has these values of the trial."""
    exact = [float.fromhex(each) for each in numbers]
    with _disable_current_modes(), torch.no_grad():
        h = _probe(interleaved, values.device)
        for i, each in enumerate(_candidates(exact[:split], exact[split:], interleaved)):
            if torch.allclose(each(h), values, rtol=1e-5, atol=1e-6):
                return i
    return None


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: that takes a second.
_apply_gate._dynamo_marked_constant = True  # type: ignore[attr-defined]
_probe._dynamo_marked_constant = True  # type: ignore[attr-defined]
_first_alike._dynamo_marked_constant = True  # type: ignore[attr-defined]
