"""What every run of a comparison has in common."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from .gpt import VOCABULARY

__all__ = ["Settings", "check_device"]


@dataclass(frozen=True)
class Settings:
    """Model, schedule and measurements; the defaults fit four recipes and three seeds in minutes.

    Those are for a CPU; :meth:`on` has others for a GPU.

    Raises ValueError for ``steps`` and ``seeds`` below 1, for a device that is not there, and for
    ranks (``fsdp``, ``ep``, ``tp``) that cannot share a batch or the model.
    """

    steps: int = 250
    seeds: int = 3
    device: str = "cpu"
    # ranks that train a model together; None of all: each run is one process
    fsdp: int | None = None  # that share batches, and weights between products
    ep: int | None = None  # that share batches, and experts with those of tp
    tp: int | None = None  # that share layers, and tokens between them
    # the model: 1.4 million parameters
    width: int = 192
    layers: int = 3
    heads: int = 3
    context: int = 128
    fused_attention: bool = False  # on a CPU and at this size half as fast
    compile: bool = False  # the blocks, by torch.compile
    experts: int = 0  # of a block; 0: a perceptron
    top_k: int = 2  # experts of a token
    expert_size: int = 0  # columns between the products of an expert
    balance: float = 0.01  # what the balancing loss is multiplied by
    # the optimizer: AdamW, linear warmup, then a cosine down to zero
    batch: int = 4
    learning_rate: float = 1e-3  # three times this learns faster, but drowns what is compared
    warmup: float = 0.3  # of the steps; a shorter one makes equal runs drift further apart
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    # what is measured
    validations: int = 5  # evenly spread, the last after the last step
    validation_sequences: int = 96
    validation_batch: int = 16
    samples: int = 4  # steps whose tensors are looked at, evenly spread
    saves: int = 5  # times that an unfinished run is saved, evenly spread
    log_every: int = 1  # steps; to look at a loss is to wait for the device

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; give 1 or more")
        check_device(self.device)
        if self.mesh:
            self._check_ranks()

    @property
    def mesh(self) -> dict[str, int]:
        """How many ranks there are along each dimension that is given."""
        given = {"fsdp": self.fsdp, "ep": self.ep, "tp": self.tp}
        return {name: ranks for name, ranks in given.items() if ranks is not None}

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return math.prod(self.mesh.values())

    def _check_ranks(self) -> None:
        for name, ranks in self.mesh.items():
            if ranks < 1:
                raise ValueError(f"{name}: got {ranks}; give 1 or more")
        if self.ep is not None and not self.experts:
            raise ValueError(
                "ep: is given without moe, and ranks share no experts; give --moe, or leave out "
                "--ep"
            )
        for dimensions, sizes in self._shared().items():
            names = [name for name in dimensions if name in self.mesh]
            if names:
                self._check_even(names, sizes)
        beside = " and ".join(self.mesh)
        if ":" in self.device:
            raise ValueError(f"device: got {self.device!r} beside {beside}; give cuda: one a rank")
        if self.compile and self.experts:
            raise ValueError(
                f"compile: is given with moe beside {beside}, and experts of ranks are not compiled"
                " yet; leave one out"
            )

    def _shared(self) -> dict[tuple[str, ...], dict[str, int]]:
        """What the ranks of dimensions share, and how much there is of it."""
        found = {
            ("fsdp", "ep"): {f"a batch of {self.batch} sequences": self.batch},
            ("tp",): {
                f"{self.heads} heads": self.heads,
                f"sequences of {self.context} bytes": self.context,
                f"a vocabulary of {VOCABULARY} bytes": VOCABULARY,
            },
        }
        if self.experts:
            found["ep", "tp"] = {f"{self.experts} experts": self.experts}
        return found

    def _check_even(self, names: list[str], sizes: dict[str, int]) -> None:
        given = [self.mesh[name] for name in names]
        most = math.gcd(*sizes.values())
        for what, size in sizes.items():
            if size % math.prod(given):
                several = "numbers whose product is " if len(names) > 1 else ""
                raise ValueError(
                    f"{' and '.join(names)}: got {' x '.join(map(str, given))}, but ranks share "
                    f"{what} evenly; choose {several}one of "
                    f"{', '.join(str(n) for n in range(1, most + 1) if most % n == 0)}"
                )

    @classmethod
    def on(cls, device: str, moe: bool = False, **given: Any) -> Settings:
        """What suits ``device``, but for what is given; ``moe``: with experts."""
        suits = {} if device == "cpu" else dict(_GPU)
        if device == "cpu" and given.get("tp") is not None:
            suits |= _CPU_TENSOR
        if moe:
            suits |= _CPU_EXPERTS if device == "cpu" else _GPU_EXPERTS
        return cls(device=device, **{**suits, **given})

    def is_due(self, step: int, times: int) -> bool:
        """Whether one of ``times`` evenly spread events falls on ``step``; one does on the last."""
        return step * times // self.steps != (step - 1) * times // self.steps

    def learning_rate_at(self, step: int) -> float:
        """For ``step``, counted from 1: linear warmup, then a cosine down to nearly zero."""
        warmup = max(1, round(self.warmup * self.steps))
        if step <= warmup:
            return self.learning_rate * step / warmup
        done = (step - warmup) / (self.steps - warmup + 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


#: 151 million parameters (the blocks of GPT-2 small, a third wider, as a byte needs no embedding to
#: speak of) and batches that fill an H200.
_GPU: Mapping[str, Any] = MappingProxyType(
    {
        "steps": 1000,
        "seeds": 1,
        "width": 1024,
        "layers": 12,
        "heads": 16,
        "context": 1024,
        "fused_attention": True,
        "batch": 32,
        "learning_rate": 6e-4,
        "warmup": 0.1,
        "validations": 10,
        "validation_sequences": 256,
        "validation_batch": 32,
        "samples": 2,
        "log_every": 10,
    }
)

#: 2.5 million parameters: heads and blocks that 2 and 4 ranks share evenly.
_CPU_TENSOR: Mapping[str, Any] = MappingProxyType({"width": 256, "heads": 4})

#: 3.2 million parameters, 1.2 million of which a token uses.
_CPU_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"experts": 8, "expert_size": 192, "seeds": 1, "steps": 150}
)

#: 1.1 billion parameters, 180 million of which a token uses; 23 million tokens.
_GPU_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"experts": 32, "top_k": 4, "expert_size": 896, "steps": 700, "saves": 2}  # 13 GB each
)


def check_device(device: str) -> None:
    """ValueError unless ``device`` is ``cpu`` or a CUDA device that torch sees."""
    named = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if named is None:
        raise ValueError(f"device: got {device!r}; choose 'cpu', 'cuda' or 'cuda:0'")
    if device != "cpu" and int(named[1] or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: {device!r} is asked for, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
