"""``blockscale warm``: the kernels of a model's layers, compiled ahead."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .emulate_ours import choose_arch
from .sizes import parse_sizes

__all__ = ["warm"]


def warm(
    layers: Annotated[str, typer.Argument(help="Weights (N, K) of linear layers: 4096x4096,...")],
    tokens: Annotated[str, typer.Option(help="Rows that layers are called with.")] = "1,4096",
    recipe: Annotated[str, typer.Option(help="A format, or fp8_block.")] = "mxfp8",
    dtype: Annotated[str, typer.Option(help="Of activations and weights.")] = "bfloat16",
    train: Annotated[bool, typer.Option(help="The backward, too.")] = True,
    arch: Annotated[
        str, typer.Option(help="For which there is no GPU here: sm_90a, sm_100a or sm_103a.")
    ] = "",
    processes: Annotated[int | None, typer.Option(help="That compile at once.")] = None,
) -> None:
    """Compile the kernels of linear layers into the cache on disk, several at once.

    Example: blockscale warm 6144x4096,4096x4096,28672x4096,4096x14336 --tokens 1,16,4096

    A model's first step then loads them, where it compiles one after another without. In a
    program, `with blockscale.warm():` around a step does it for whatever the step calls.
    """
    import torch

    from ..checks import choose
    from ..kernels.common.gpu import GPUS
    from ..kernels.common.runtime import gpu_of, missing, standing_in
    from ..nn import Linear, Recipe
    from ..tensor_checks import DTYPES
    from ..warm import warm as warming

    shapes = parse_sizes("layers", layers, "N and K", "4096x4096")
    rows = [m for (m,) in parse_sizes("tokens", tokens, "a number", "4096")]
    kind = choose("dtype", dtype, {str(d).removeprefix("torch."): d for d in DTYPES})
    device = torch.device("cpu" if arch or not torch.cuda.is_available() else "cuda")
    if missing():
        raise ValueError(f"kernels cannot be compiled: {missing()}")
    gpu = choose_arch(arch, GPUS) if arch else gpu_of(device)
    if gpu is None:
        raise ValueError(
            "arch: there is no GPU with kernels here; name the one that will load them, one of "
            f"{', '.join(GPUS)}"
        )
    start = time.perf_counter()
    with standing_in(lambda _: gpu), warming(processes=processes) as found:
        for n, k in shapes:
            layer = Linear(k, n, device=device, dtype=kind, recipe=Recipe(recipe))
            for m in rows:
                x = torch.zeros(m, k, device=device, dtype=layer.weight.dtype, requires_grad=train)
                with torch.set_grad_enabled(train):
                    y = layer(x)
                if train:
                    y.backward(torch.zeros_like(y))
    took = time.perf_counter() - start
    print(f"{len(set(found))} kernels for {gpu.arch} are in the cache, after {took:.1f} s")
