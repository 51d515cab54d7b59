"""sonic-moe, in bf16, on the layers of ``gpu_moe.py``: microseconds of a forward, and of both
passes, and bytes of a token that are kept between them beside inputs and result.

    python3 benchmarks/gpu_sonic_moe.py FILE.json   # with sonic-moe and quack-kernels installed

A process of its own, since they want another CuTe DSL than ours; only our timer and shapes are
loaded. Their products are tuned at the first call of each shape, which takes minutes, most of them
in compiling: ``QUACK_CACHE_DIR`` keeps what is compiled. Run it twice, the second time alone on the
device. Their layer has the router in it: its product, softmax, top-k and their gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from sonicmoe import moe_TC_softmax_topk_layer  # type: ignore[import-not-found]
from sonicmoe.enums import ActivationType  # type: ignore[import-not-found]


def load(name: str):
    """A module of our benchmarks, without our package."""
    source = Path(__file__).parents[1] / f"src/blockscale/bench/{name}.py"
    spec = spec_from_file_location(name, source)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(timer, shape) -> dict[str, float]:
    hidden, inner, experts, top_k, tokens = shape
    how = {"device": "cuda", "dtype": torch.bfloat16}
    x, router = (torch.randn(n, hidden, **how).requires_grad_() for n in (tokens, experts))
    up = torch.randn(experts, 2 * inner, hidden, **how).mul_(hidden**-0.5).requires_grad_()
    down = torch.randn(experts, hidden, inner, **how).mul_(inner**-0.5).requires_grad_()
    grad, stream = torch.randn(tokens, hidden, **how), torch.cuda.current_stream().cuda_stream

    def layer(inference: bool = False) -> torch.Tensor:
        weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        given = x, router, *weights, top_k, stream, ActivationType.SWIGLU, inference
        return moe_TC_softmax_topk_layer(*given)[0]

    def both() -> None:
        for each in (x, router, up, down):
            each.grad = None
        layer().backward(grad)

    def forward() -> None:
        with torch.no_grad():
            layer(inference=True)

    both()
    forward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer()
    kept = (torch.cuda.memory_allocated() - before - y.nbytes) / tokens
    y.backward(grad)
    times = {"both": timer.microseconds(both, 8), "forward": timer.microseconds(forward, 8)}
    return {**times, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    args, timer, layers = parser.parse_args(), load("timing").Timer(), {}
    found = {
        "device": torch.cuda.get_device_name(),
        "sonic-moe": version("sonic-moe"),
        "layers": layers,
    }
    for name, shape in load("moe_shapes").SHAPES.items():
        layers[name] = measure(timer, shape)
        torch.cuda.empty_cache()
        args.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
