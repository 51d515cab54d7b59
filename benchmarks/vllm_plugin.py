r"""Does vLLM 0.33 serve quantized folders by blockscale's layers, and are the numbers right?

On a CPU, in the environment of ``vllm_loader.py``, whose tiny models, comparison and stand-ins for
what a CPU lacks are used here; kernels of vLLM are not, as the layers are blockscale's. Folders of
each convention and format are loaded by vLLM's own ``get_model`` with ``quantization="blockscale"``
and compared, layer by layer:

- layers: each that is quantized in the folder is run by ``ServedLinear`` or ``ServedExperts``;
- weights: codes, block scales and global scales after loading are those of ``load_folder``, byte
  for byte, with q, k and v (gate and up) one below the other;
- outputs: bit for bit those of ``bs.nn.quantized_linear``, of ``bs.gemm`` where NVFP4's activations
  have the folder's global scale, and of the same products expert by expert;
- logits: the model in vLLM, and transformers' with our weights and our quantized inputs, both in
  fp32; of a mixture where activations are not quantized. 52 dB is the rounding of vLLM's logits to
  bf16;
- compiled: torch.compile of a layer's MLP, whole and of any number of tokens, has the same bits.

Then (``vllm_limits.py``): unusual folders, two ranks that share layers, and what is refused.

    pip install -e .                       in that environment, so that vLLM finds the plugin
    python benchmarks/vllm_plugin.py       writes benchmarks/results/vllm_plugin.json, four minutes
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm_limits as limits
import vllm_loader as loader  # sets vLLM up for a CPU
from vllm_loader import Case, shown, sqnr

import torch  # isort: skip
from torch import Tensor, nn  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip
from vllm.config import VllmConfig  # isort: skip

import blockscale as bs
from blockscale import checkpoint

RESULT = Path(__file__).resolve().parent / "results" / "vllm_plugin.json"
PROJECTIONS = ("gate_proj", "up_proj")


def product(x: Tensor, q: bs.ScaledTensor, recipe: bs.Recipe, scale: Tensor | None) -> Tensor:
    """``x @ q.T`` by blockscale's own functions."""
    if scale is None:
        return bs.nn.quantized_linear(x, q, recipe=recipe)
    return bs.gemm(bs.quantize(x, "nvfp4", global_scale=scale), q.mT, x.dtype)


@dataclass(frozen=True)
class Served(Case):
    """A folder that is served by blockscale's layers."""

    @property
    def recipe(self) -> bs.Recipe:
        return bs.Recipe(self.format, activations=self.activations)

    def load(self, folder: Path) -> tuple[Any, VllmConfig]:
        named = None if self.convention == "blockscale" else "blockscale"  # found by its config
        return loader.load(folder, quantization=named)

    def scale(self, state: dict[str, Any], weight: str) -> Tensor | None:
        """The global scale of a layer's input, where it is quantized with one."""
        if self.format != "nvfp4" or self.weight_only:
            return None
        return state.get(f"{weight.removesuffix('weight')}input_scale", torch.tensor(1.0))

    def largest(self, state: dict[str, Any], weights: list[str]) -> Tensor | None:
        """The same of experts, which share one."""
        scales = [x for each in weights if (x := self.scale(state, each)) is not None]
        return max(scales) if scales else None

    def inputs(self, state: dict[str, Any], weight: str, x: Tensor) -> Tensor:
        if self.weight_only:
            return x.float()
        scale = self.scale(state, weight)
        return bs.quantize(x, self.format, global_scale=scale).dequantize(torch.float32)

    def _weights(self, model: Any, state: dict[str, Any]) -> dict[str, Any]:
        differ, names = [], set()
        for ours, parts in held(model, state):
            names |= {*ours}
            if not same(parts, [state[name] for name in ours]):
                differ.append("+".join(ours))
        every = {name for name, each in state.items() if isinstance(each, bs.ScaledTensor)}
        return {
            "weights": len(names),
            "weights_equal": not differ and names == every,
            **({"weights_that_differ": differ} if differ else {}),
        }

    def _outputs(self, model: Any, state: dict[str, Any]) -> dict[str, Any]:
        generator, wrong = torch.Generator().manual_seed(0), []
        made: dict[str, int] = {}
        for name, layer in model.named_modules():
            if hasattr(layer, "served") and isinstance(layer.served, nn.ModuleList):
                of = "linear", self._linear(model, state, name, layer, generator)
            elif hasattr(layer, "served"):
                of = "experts", self._experts(state, name, layer, generator)
            else:
                continue
            made[of[0]] = made.get(of[0], 0) + 1
            if not of[1]:
                wrong.append(name)
        return {
            **{f"{kind}_layers": count for kind, count in made.items()},
            "outputs_db": float("-inf") if wrong else float("inf"),
            **({"outputs_that_differ": wrong} if wrong else {}),
        }

    def _linear(self, model: Any, state: Any, name: str, layer: Any, g: torch.Generator) -> bool:
        ours = loader.members(model, name)
        x = torch.randn(loader.TOKENS, layer.input_size, generator=g).bfloat16()
        whole = len(layer.served) == 1
        parts = [torch.cat([state[each] for each in ours])] if whole else [state[n] for n in ours]
        scales = [self.scale(state, each) for each in ours]
        expected = [product(x, q, self.recipe, s) for q, s in zip(parts, scales, strict=False)]
        got = layer.quant_method.apply(layer, x)
        return torch.equal(torch.cat(expected, -1), got)

    def _experts(self, state: Any, name: str, layer: Any, g: torch.Generator) -> bool:
        """Pair by pair, added up in the order in which tokens name their experts."""
        parent, (experts, _, hidden) = name.removesuffix(".routed_experts"), layer.served.up.shape
        x = torch.randn(loader.TOKENS, hidden, generator=g).bfloat16()
        weights, ids = torch.rand(loader.TOKENS, experts, generator=g).topk(2)
        got = layer.quant_method.apply(layer, x, weights, ids.int(), None, None)
        rows = torch.empty(loader.TOKENS, 2, hidden, dtype=torch.bfloat16)
        scales = [
            self.largest(state, [f"{parent}.{e}.{x}.weight" for e in range(experts) for x in of])
            for of in (PROJECTIONS, ("down_proj",))
        ]
        for e in range(experts):
            tokens, j = torch.where(ids == e)
            gate, up, down = (
                state[f"{parent}.{e}.{each}.weight"] for each in (*PROJECTIONS, "down_proj")
            )
            h = torch.cat([product(x[tokens], q, self.recipe, scales[0]) for q in (gate, up)], 1)
            if self.weight_only:
                y = product(bs.nn.SWIGLU(h), down, self.recipe, None)
            else:
                (a,) = bs.swiglu_quantize(h, self.format, axes=(-1,), global_scale=scales[1])
                y = bs.gemm(a, down.mT, torch.bfloat16)
            rows[tokens, j] = y
        first, second = (weights[:, i, None] * rows[:, i].float() for i in range(2))
        return torch.equal((first + second).bfloat16(), got)

    def run(self, folder: Path, source: Path) -> dict[str, Any]:
        out = super().run(folder, source)
        if self.model == "qwen3_moe" and self.weight_only and out["loaded"]:
            out |= self._mixture_logits(folder, source)
        return out

    def _mixture_logits(self, folder: Path, source: Path) -> dict[str, Any]:
        model, config = self.load(folder)
        state = checkpoint.load_folder(folder)
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        values = {
            name: x.dequantize(torch.float32)
            for name, x in state.items()
            if isinstance(x, bs.ScaledTensor)
        }
        for name, layer in reference.named_modules():
            if f"{name}.weight" in values:
                layer.weight = frozen(values[f"{name}.weight"])
            elif hasattr(layer, "gate_up_proj"):
                of = partial(stack, values, name, len(layer.gate_up_proj))
                layer.gate_up_proj, layer.down_proj = of(PROJECTIONS), of(("down_proj",))
        ids = torch.arange(loader.TOKENS) * 37 % loader.SIZES["vocab_size"]
        with torch.no_grad():
            expected = reference(ids[None]).logits[0]
        return {"logits_db": shown(sqnr(expected, limits.logits(model, config)))}


def frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


def stack(values: dict[str, Tensor], name: str, experts: int, of: tuple[str, ...]) -> nn.Parameter:
    """Matrices of all experts, as transformers holds them."""
    each = (torch.cat([values[f"{name}.{e}.{part}.weight"] for part in of]) for e in range(experts))
    return frozen(torch.stack([*each]))


def held(model: Any, state: dict[str, Any]) -> Iterator[tuple[list[str], list[bs.ScaledTensor]]]:
    """Names of a folder's weights, and what vLLM holds of them."""
    for name, layer in model.named_modules():
        if not hasattr(layer, "served"):
            continue
        if isinstance(layer.served, nn.ModuleList):
            yield loader.members(model, name), [each.weight for each in layer.served]
            continue
        parent, ups = name.removesuffix(".routed_experts"), [layer.served.up.weight]
        if layer.served.gate is not None:
            ups.insert(0, layer.served.gate.weight)
        for e in range(len(ups[0])):
            yield [f"{parent}.{e}.{each}.weight" for each in PROJECTIONS], [x[e] for x in ups]
            yield [f"{parent}.{e}.down_proj.weight"], [layer.served.down.weight[e]]


def same(ours: list[bs.ScaledTensor], theirs: list[bs.ScaledTensor]) -> bool:
    """Whether matrices below each other have the same bytes, and the same global scales."""
    joined = [
        [torch.cat([x.qdata.view(torch.uint8) for x in each]) for each in (ours, theirs)],
        [torch.cat([x.compact_bytes() for x in each]) for each in (ours, theirs)],
    ]
    scalars = [
        {x.global_scale.item() for x in each if x.format.has_global_scale}
        for each in (ours, theirs)
    ]
    return all(torch.equal(*pair) for pair in joined) and scalars[0] == scalars[1]


# --- all ------------------------------------------------------------------------------------------


def compiled(folder: Path) -> dict[str, Any]:
    """A layer's MLP as one graph, for any number of tokens."""
    model, _ = loader.load(folder, quantization="blockscale")
    mlp = model.model.layers[0].mlp
    graph = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    found = []
    with torch.no_grad():
        for tokens in (1, 7, 64):
            x = torch.randn(tokens, loader.SIZES["hidden_size"]).bfloat16()
            found.append(torch.equal(graph(x), mlp(x)))
    return {"check": "a layer's MLP, compiled whole, of 1, 7 and 64 tokens", "right": all(found)}


def cases() -> Iterator[Served]:
    for model in ("llama", "qwen3_moe"):
        for convention, formats, also in (
            ("modelopt", ("nvfp4", "mxfp8"), ("nvfp4",)),
            ("compressed-tensors", ("nvfp4", "mxfp8", "mxfp4"), ("nvfp4", "mxfp8", "mxfp4")),
            ("blockscale", ("nvfp4", "mxfp8", "mxfp4"), ()),
            ("fine-grained", ("mxfp8",), ()),
        ):
            for format in formats:
                yield Served(model, convention, format)
            for format in also:
                yield Served(model, convention, format, weight_only=True)


def run(place: Path) -> Iterator[dict[str, Any]]:
    source = loader.sources(place)
    for case in cases():
        folder = place / "-".join(map(str, vars(case).values()))
        of = source[case.model]
        checkpoint.quantize_folder(
            *(of, folder, case.format, case.convention), activations=case.activations
        )
        yield case.run(folder, of)
    for format in ("nvfp4", "mxfp8"):
        yield {"format": format, **compiled(place / f"llama-modelopt-{format}-False-")}
    yield from limits.unusual(place, source, Served)
    yield limits.compiled_by_vllm(place)
    yield limits.cache(place)
    yield limits.gpt_oss(place)
    yield limits.on_a_hub(place)
    yield from limits.refusals(place, source)
    yield from limits.ranks(place)


def main() -> int:
    """Run, print, write. 1 unless all is right."""
    warnings.filterwarnings("ignore")
    limits.prepare()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for each in run(Path(scratch)):
            results.append(each)
            print(json.dumps(each), flush=True)
    packages = ("vllm", "torch", "transformers", "compressed-tensors")
    versions = {"blockscale": bs.__version__, **{name: version(name) for name in packages}}
    out = {"versions": versions, "machine": platform.machine(), "right_from_db": loader.RIGHT}
    RESULT.write_text(json.dumps({**out, "cases": results}, indent=1) + "\n")
    return int(
        not all(
            each["loaded"] and each["right"] if "loaded" in each else each["right"]
            for each in results
        )
    )


if __name__ == "__main__":
    sys.exit(main())
