"""Tokens a second of a Llama of 8 billion parameters, decoding under CUDA graphs, on one GPU.

    python benchmarks/gpu_decode.py OUT.json [--batch 1] [--batch 16] [--minutes 5]

transformers' Llama with random weights and a static cache of 512 tokens: one step is one token for
each sequence, its logits and the next token, compiled by torch, which fuses what is between the
products, recorded in a graph and replayed. Weights in bf16, MXFP8, NVFP4 and MXFP4, activations in
bf16; q, k and v, and gate and up, as one product (``bs.nn.fuse_projections``; bf16 as Phi-3, whose
model has them so); the output head in bf16, as by default, or quantized; with and without
inductor's ``triton.enable_pdl``. Attention is two batched products of each head of k and v by the
four of q that it serves: torch's takes no mask with fewer heads of k and v, so that transformers
repeats these in each step.

Each model has a process, which compiles its steps while others do; when all are there, they are
timed one after the other, in three rounds, so that all rows are of one run. What is not there after
``--minutes`` is left out, and named.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.multiprocessing as mp
import transformers
import typer
from torch import Tensor
from torch.autograd import DeviceType

import blockscale as bs

SHAPE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
LENGTH, FILLED, ROUNDS, REPLAYS = 512, 100, 3, 20
#: To build: a model is in bf16 before it is quantized, and all at once would not fit.
AT_ONCE = 2


class Served(NamedTuple):
    """A model and its batches. ``pdl``: inductor's kernels, too, let the next one come early."""

    weights: str | None
    batches: tuple[int, ...] = (1, 16, 64)
    quantized_head: bool = False
    pdl: bool = False


MODELS = (
    *(Served(format) for format in (None, "mxfp8", "nvfp4", "mxfp4")),
    *(Served(format, (1,), quantized_head=True) for format in ("mxfp8", "nvfp4", "mxfp4")),
    *(Served(format, (1,), pdl=True) for format in (None, "mxfp8", "nvfp4", "mxfp4")),
    *(Served(format, (1,), quantized_head=True, pdl=True) for format in ("nvfp4", "mxfp4")),
)


def main(
    out: Path,
    minutes: float = 5,
    batch: Annotated[list[int], typer.Option()] = [1, 16, 64],  # noqa: B006
    device: str = "cuda",
) -> None:
    ends = time.monotonic() + 60 * minutes
    context = mp.get_context("spawn")
    room, workers = context.Semaphore(AT_ONCE), list[tuple[Served, Any, Any]]()
    for served in MODELS:
        wanted = tuple(each for each in served.batches if each in batch)
        if not wanted:
            continue
        served, (here, there) = served._replace(batches=wanted), context.Pipe()
        process = context.Process(target=serve, args=(served, device, room, there), daemon=True)
        process.start()
        workers.append((served, process, here))
    failed = {}
    for served, _, pipe in workers:
        if said := receive(pipe, ends):
            failed[served] = said
            print(served, said, flush=True)
    rows: dict[tuple[Served, int], dict[str, Any]] = {}
    for _ in range(ROUNDS):
        for served, _, pipe in workers:
            for each in served.batches if served not in failed else ():
                pipe.send(each)
                milliseconds, kernels = pipe.recv()
                row = rows.setdefault((served, each), {"rounds": [], "kernels": kernels})
                row["rounds"].append(milliseconds)
        write(out, rows, failed, device)  # after each round: a later one may not end
    for served, process, pipe in workers:
        if served in failed:
            process.kill()
        else:
            pipe.send(None)
        process.join()


def write(
    out: Path,
    rows: dict[tuple[Served, int], dict[str, Any]],
    failed: dict[Served, str],
    device: str,
) -> None:
    found = []
    for (served, batch), row in rows.items():
        per_step = median(row["rounds"])
        described = {**served._asdict(), "weights": served.weights or "bf16", "batch": batch}
        del described["batches"]
        described["milliseconds"] = per_step
        described["tokens_per_second"] = round(1e3 * batch / per_step, 1)
        print(described, flush=True)
        found.append({**described, **row})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    gpu = torch.cuda.get_device_name() if device == "cuda" else device
    about = {"device": gpu, **versions, "shape": SHAPE, "rows": found}
    about["failed"] = [{**each._asdict(), "why": why} for each, why in failed.items()]
    out.write_text(json.dumps(about, indent=1) + "\n")


def receive(pipe: Any, ends: float) -> str:
    """What a process says: why it has failed, or nothing when it is ready."""
    if not pipe.poll(max(1.0, ends - time.monotonic())):
        return "not there in time"
    try:
        return str(pipe.recv())
    except EOFError:
        return "the process ended"


# --- in a process of a model ----------------------------------------------------------------------


def serve(served: Served, device: str, room: Any, pipe: Any) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    torch.set_num_threads(1)
    if served.pdl:
        torch._inductor.config.triton.enable_pdl = True
    try:
        with room:
            model = build(served, device)
        graphs = {batch: record(model, batch, device) for batch in served.batches}
    except Exception:
        pipe.send(traceback.format_exc()[-2000:])
        return
    pipe.send("")
    while (batch := pipe.recv()) is not None:
        pipe.send(replayed(graphs[batch]))


def build(served: Served, device: str) -> Any:
    transformers.AttentionInterface.register("grouped", attend)
    shape = SHAPE if device == "cuda" else TINY
    architecture = "Phi3" if served.weights is None else "Llama"
    config = getattr(transformers, f"{architecture}Config")(
        **shape, attn_implementation="grouped", tie_word_embeddings=False, pad_token_id=0
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(torch.bfloat16)
    model.to_empty(device=device).eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # has buffers
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02).view(-1)[0] = 0.25  # the largest: one global scale for all
    if served.weights is not None:
        recipe = bs.Recipe(served.weights, activations="bfloat16")
        overrides = {"lm_head": recipe} if served.quantized_head else {}
        bs.quantize_(model, bs.Recipe(served.weights, activations="bfloat16", overrides=overrides))
        bs.nn.fuse_projections(model)
    if device == "cuda":
        torch.cuda.empty_cache()
    return model


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Of one new token: each head of k and v by those of q that it serves."""
    batch, heads, _, width = query.shape
    q = query.view(batch, key.shape[1], -1, width)
    scores = (q @ key.mT).float() * scaling + mask
    y = scores.softmax(-1).to(query.dtype) @ value
    return y.view(batch, 1, heads, width), None


def record(model: Any, batch: int, device: str) -> Any:
    """A graph of a step."""
    torch._dynamo.reset()
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
    place = torch.full((1,), FILLED, dtype=torch.long, device=device)
    forward = torch.compile(model.forward, dynamic=False)
    given = {
        "cache_position": place,
        "position_ids": place[None].expand(batch, 1),
        "attention_mask": torch.zeros(batch, 1, 1, LENGTH, dtype=torch.bfloat16, device=device),
    }

    def step() -> None:
        with torch.no_grad():
            logits = forward(tokens, past_key_values=cache, use_cache=True, **given).logits
            tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    for _ in range(3):
        step()
    if device == "cpu":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.kept = cache, tokens, given  # type: ignore[attr-defined]  # memory that it reads
    return graph


def replayed(graph: Any) -> tuple[float, dict[str, list[float]]]:
    """Milliseconds of a step, the median of five times twenty; and of each kernel how often it runs
    and its microseconds in all."""
    if graph is None:
        return 1.0, {}
    times = sorted(_replays(graph) for _ in range(5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            kernels.setdefault(event.name[:100], []).append(event.time_range.elapsed_us())
    counted = {n: [len(t), round(sum(t), 1)] for n, t in kernels.items()}
    return round(times[2], 4), counted


def _replays(graph: Any) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(REPLAYS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / REPLAYS


if __name__ == "__main__":
    typer.run(main)
