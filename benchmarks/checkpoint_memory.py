"""Convert a folder of the shape of a 70B model, and see how much memory that takes.

``python benchmarks/checkpoint_memory.py [--place DIR] [--files N]``: the source is sparse files
(all zeros, no blocks of the disk), and each file that is made is cut to nothing as soon as it has
its name and its manifest was checked, so that little disk is needed. Writes
benchmarks/results/checkpoint_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import torch

from blockscale import checkpoint
from blockscale.checkpoint.header import build
from blockscale.checkpoint.manifest import read_manifest

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "checkpoint_memory.json"
#: Llama 3 70B, but for the number of its layers, which --files decides.
HIDDEN, WIDE, KV, VOCABULARY, LAYERS = 8192, 28672, 1024, 128256, 80


def shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """Of a layer."""
    of = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE), "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in of.items()}


def make(folder: Path, files: int) -> int:
    """Sparse files and their index; bytes of weights."""
    folder.mkdir()
    places: dict[str, str] = {}
    total = 0
    for i in range(files):
        tensors = dict[str, tuple[int, ...]]()
        for layer in range(i * LAYERS // files, (i + 1) * LAYERS // files):
            tensors |= shapes(layer)
        if i == 0:
            tensors["model.embed_tokens.weight"] = (VOCABULARY, HIDDEN)
        if i == files - 1:
            tensors["lm_head.weight"] = (VOCABULARY, HIDDEN)
        head, header = build(((n, "BF16", s) for n, s in tensors.items()), {"format": "pt"})
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        with open(folder / file, "wb") as out:
            out.write(head)
            out.truncate(header.file_size)
        places |= dict.fromkeys(tensors, file)
        total += header.file_size
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return total


class Cutter:
    """Cuts finished files; a ``progress``."""

    def __init__(self, work: Path) -> None:
        self.work, self.cut = work, 0

    def __call__(self, event: checkpoint.Progress) -> None:
        for path in self.work.glob("*.safetensors"):
            if path.stat().st_size and read_manifest(path) is not None:
                os.truncate(path, 0)
                self.cut += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path)
    parser.add_argument("--files", type=int, default=30)
    parser.add_argument("--format", default="nvfp4")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        source, target = Path(place) / "in", Path(place) / "out"
        nbytes = make(source, args.files)
        cutter = Cutter(Path(place) / "out.partial")
        start = time.perf_counter()
        manifest = checkpoint.quantize_folder(
            source, target, args.format, "modelopt", progress=cutter
        )
        seconds = time.perf_counter() - start
    result = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "format": args.format,
        "files": args.files,
        "bytes": nbytes,
        "made_bytes": manifest["summary"]["bytes"],
        "seconds": round(seconds, 1),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
