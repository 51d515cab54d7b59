"""Whether 8 and 4 bits train as bf16 does: a GPT under several recipes with one seed, on one GPU.

    python benchmarks/gpu_parity.py OUT --model dense --seed 0 --stop-after 9
    python benchmarks/gpu_parity.py OUT --join benchmarks/results/parity_h200.json

Learns from the Python sources that are installed, split by package, as ``blockscale train`` does.
A second call with the same folder goes on where the first one was stopped. ``--join`` puts the runs
of a folder into one file, with the differences to bf16.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer

import blockscale as bs
from blockscale import training
from blockscale.nn.nvfp4 import METHODS
from blockscale.training import saves
from blockscale.training.run import Progress, train
from blockscale.training.saves import Saves, Stopped
from blockscale.training.sources import choose_text

RECIPES = ("bf16", "fp8_block", "mxfp8")
#: Sequences a step, tokens in all unless --tokens says otherwise, and the sizes of the models.
BATCH, TOKENS = 32, 50_331_648
MODELS: dict[str, dict[str, Any]] = {
    # 28 million parameters
    "small": {"width": 512, "layers": 9, "heads": 8, "learning_rate": 1e-3, "compile": True},
    # 354 million parameters
    "dense": {"width": 1280, "layers": 18, "heads": 20, "learning_rate": 4e-4, "compile": True},
    # 1.1 billion, of which a token uses 180 million: those of ``blockscale train --moe``
    "moe": {"moe": True},
}


def _ablations() -> dict[str, bs.Recipe]:
    """NVFP4's recipes with one part switched off, or that of another one."""
    of = {name: dict(bs.Recipe.nvfp4(name).quantization) for name in METHODS}
    stochastic = bs.Quantization(stochastic=True, hadamard=bs.Hadamard(128), random_signs=True)
    in_wgrad = {
        "gradients.wgrad": of["ms_eden"]["gradients"],
        "activations.wgrad": of["ms_eden"]["activations.wgrad"],
    }
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "nvidia without squares": ("nvidia", {"weights": bs.Quantization()}),
        "nvidia without stochastic": (
            "nvidia",
            {
                "gradients.dgrad": bs.Quantization(),
                "gradients.wgrad": of["nvidia"]["activations.wgrad"],
            },
        ),
        "four_over_six without squares": (
            "four_over_six",
            {"weights": bs.Quantization(scaling="four_over_six")},
        ),
        "four_over_six, ms_eden in wgrad": ("four_over_six", in_wgrad),
        "four_over_six without squares, ms_eden in wgrad": (
            "four_over_six",
            in_wgrad | {"weights": bs.Quantization(scaling="four_over_six")},
        ),
        "ms_eden without four over six": (
            "ms_eden",
            {"activations.fprop": bs.Quantization(), "weights.fprop": bs.Quantization()},
        ),
        "ms_eden, stochastic instead": (
            "ms_eden",
            dict.fromkeys(("gradients", "activations.wgrad", "weights.dgrad"), stochastic),
        ),
    }
    made = {
        f"nvfp4 {name}": bs.Recipe("nvfp4", quantization={**of[base], **change})
        for name, (base, change) in changes.items()
    }
    without = {"hadamard": None}
    return made | {
        "nvfp4 nvidia without hadamard": bs.Recipe.nvfp4(**without),
        "nvfp4 four_over_six without squares and hadamard": bs.Recipe(
            "nvfp4",
            quantization={
                **dict(bs.Recipe.nvfp4("four_over_six", **without).quantization),
                "weights": bs.Quantization(scaling="four_over_six"),
            },
        ),
        "nvfp4 ms_eden of 16": bs.Recipe.nvfp4("ms_eden", hadamard=bs.Hadamard(16)),
    }


def main(
    folder: Path,
    model: str = "dense",
    seed: int = 0,
    tokens: int = TOKENS,
    sequences: Annotated[int, typer.Option(help="In each validation.")] = 256,
    recipe: Annotated[list[str] | None, typer.Option()] = None,
    stop_after: Annotated[float, typer.Option(help="Minutes.")] = 1e9,
    join: Annotated[Path | None, typer.Option()] = None,
) -> None:
    if join is not None:
        join.write_text(json.dumps(joined(folder), indent=1) + "\n")
        return
    ends = time.monotonic() + 60 * stop_after
    settings = training.Settings.on(
        "cuda",
        **MODELS[model],
        **{"batch": BATCH, "steps": -(-tokens // BATCH // 1024), "saves": 0, "samples": 0},
        validation_sequences=sequences,
    )
    training.run.RECIPES = {**training.run.RECIPES, **_ablations()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "unfinished").mkdir(exist_ok=True)
    text = choose_text(None, "cuda")
    corpus = training.Corpus(text, settings.context, "cuda")
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "text": text.source,
        "bytes": len(text),
        "sha256": saves.digest(text),
        "held_out": text.held_out,
        "held_out_bytes": len(text.validation),
        "settings": asdict(settings),
    }
    for name in recipe or RECIPES:
        done = folder / f"{model}-{name}-{seed}.json"
        if done.exists():
            continue
        began = time.monotonic()
        where = Saves(folder, f"{model}-{name}", seed)
        try:
            run = train(
                *(name, seed, corpus, settings, say, where),
                stop=lambda: time.monotonic() > ends,
            )
        except Stopped:
            print(f"{name} seed {seed}: stopped after {time.monotonic() - began:.0f} s")
            return
        found = asdict(run) | {"train_loss": run.train_loss[9::10], "model": model}
        done.write_text(json.dumps(about | {"run": found}))


def say(event: Progress) -> None:
    if event.validation_loss is not None or event.step % 100 == 0:
        print(
            f"{event.recipe} {event.seed}: step {event.step}, loss {event.loss:.4f}, "
            f"validation {event.validation_loss}, {event.tokens_per_second:,.0f} tokens/s",
            flush=True,
        )


def joined(folder: Path) -> dict[str, Any]:
    """All runs of a folder, those of a model together."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    common = {k: v for k, v in found[0].items() if k not in ("run", "settings")}
    assert all(each["sha256"] == common["sha256"] for each in found)
    models: dict[str, Any] = {}
    for each in found:
        run = each["run"]
        of_model = models.setdefault(run["model"], {"settings": each["settings"], "runs": []})
        of_model["runs"].append(run)
    for of_model in models.values():
        of_model["summary"] = summary(of_model["runs"])
    return common | {"models": models}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each recipe: final losses by seed, and their difference to bf16's of the same seed."""
    ends = {(run["recipe"], run["seed"]): run["validation"][-1][1] for run in runs}
    rows = {}
    for name in dict.fromkeys(run["recipe"] for run in runs):
        seeds = {seed: loss for (recipe, seed), loss in ends.items() if recipe == name}
        gaps = [100 * (v / ends["bf16", s] - 1) for s, v in seeds.items() if ("bf16", s) in ends]
        speeds = [run["tokens_per_second"] for run in runs if run["recipe"] == name]
        rows[name] = {
            "validation": seeds,
            "percent_above_bf16": gaps,
            "mean_percent": mean(gaps) if gaps else None,
            "tokens_per_second": speeds,
        }
    return rows


if __name__ == "__main__":
    typer.run(main)
