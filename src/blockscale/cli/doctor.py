"""``blockscale doctor``: what is here, what will run, and why."""

from __future__ import annotations

import json as json_module
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__

__all__ = ["Facts", "advice", "doctor", "gather"]

_DSL = ("nvidia-cutlass-dsl", "apache-tvm-ffi")  # what GPU kernels need
_PACKAGES = ("torch", "numba", *_DSL, "triton", "safetensors")

_ARCHITECTURES = {
    (9, 0): ("sm_90a", "Hopper: TMA and WGMMA"),
    (10, 0): ("sm_100a", "Blackwell (B200): TMA, tcgen05 and TMEM"),
    (10, 3): ("sm_103a", "Blackwell Ultra (B300): TMA, tcgen05 and TMEM"),
}

_UNPROVEN = ("sm_100a", "sm_103a")  # for which kernels have run in the emulator only

ARCH_STORY = (
    "{given} is not enough: block-scaled FP4 and FP8 MMAs (kind::mxf4nvf4, scale_vec::4X) exist "
    "only for the architecture-specific target {wanted}. Built for {given}, ptxas stops with "
    "\"Feature '.scale_vec::4X' not supported on .target 'sm_100f'\". The chip supports them; the "
    "suffix 'a' unlocks them. Set CUTE_DSL_ARCH={wanted} (TORCH_CUDA_ARCH_LIST, nvcc -arch alike)."
)


@dataclass(frozen=True)
class Facts:
    """What :func:`gather` found; :func:`advice` needs nothing else."""

    python: str
    platform: str
    packages: dict[str, str | None]
    cuda: str | None
    gpu: str | None
    capability: tuple[int, int] | None
    dsl_arch: str | None  # CUTE_DSL_ARCH of the environment

    @property
    def architecture(self) -> str | None:
        """sm_90a, sm_100a, ...; None without a GPU."""
        if self.capability is None:
            return None
        known = _ARCHITECTURES.get(self.capability)
        return known[0] if known else f"sm_{self.capability[0]}{self.capability[1]}"


def gather() -> Facts:
    """Look at this machine; needs neither a GPU nor a CUDA toolkit."""
    import torch

    has_gpu = torch.cuda.is_available()
    return Facts(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={"blockscale": __version__, **{name: _version(name) for name in _PACKAGES}},
        cuda=torch.version.cuda,
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
        dsl_arch=os.environ.get("CUTE_DSL_ARCH"),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def advice(facts: Facts) -> list[str]:
    """What to know and what to do, one sentence or two each; a pure function of the facts."""
    from ..kernels.common.gpu import GPUS

    lines = []
    *most, last = GPUS
    targets = f"{', '.join(most)} and {last}"
    if facts.packages["numba"] is None:
        lines.append("numba is missing: the CPU reference runs instead, about 100 times slower.")
    if facts.gpu is None:
        why = "this torch is a CPU build" if facts.cuda is None else "torch sees none"
        lines.append(f"No GPU ({why}): everything runs on the CPU, with the same bytes.")
    elif facts.capability in _ARCHITECTURES and facts.architecture in GPUS:
        lines.append(f"{facts.gpu} is {facts.architecture}, {_ARCHITECTURES[facts.capability][1]}.")
        if None in (facts.packages.get(name) for name in _DSL):
            lines.append("The CuTe DSL is missing: pip install 'blockscale[cuda]' for GPU kernels.")
        if facts.architecture in _UNPROVEN:
            lines.append(
                "No GPU of this kind has run these kernels yet: they are right in the emulator, "
                "and nothing is known of how fast they are."
            )
    else:
        lines.append(
            f"{facts.gpu} is {facts.architecture}; kernels are compiled for {targets}, so plain "
            "torch runs on it."
        )
    wanted = facts.architecture if facts.capability and facts.capability[0] == 10 else "sm_100a"
    if facts.dsl_arch in ("sm_100", "sm_100f", "sm_103", "sm_103f"):
        if facts.capability is None:
            wanted = f"sm_{facts.dsl_arch[3:6]}a"
        lines.append(f"CUTE_DSL_ARCH: {ARCH_STORY.format(given=facts.dsl_arch, wanted=wanted)}")
    elif facts.capability and facts.capability[0] == 10:
        lines.append(
            f"Kernels for this chip are built for {wanted}. "
            + ARCH_STORY.format(given="sm_100", wanted=wanted)
        )
    return lines


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what is installed, which backend each operation will use, and why."""
    from ..ops import OPERATIONS, backend

    facts = gather()
    device = "cpu" if facts.gpu is None else "cuda"
    devices = ("cpu",) if device == "cpu" else ("cpu", "cuda")
    backends = [
        {"operation": op, "device": where, "backend": name, "why": why}
        for where in devices
        for op in OPERATIONS
        for name, why in (backend(op, where),)
    ]
    if json:
        found = {**asdict(facts), "architecture": facts.architecture}
        print(json_module.dumps({**found, "backends": backends, "advice": advice(facts)}, indent=2))
        return
    console = Console()
    table = Table(title="This machine", show_header=False)
    table.add_row("Python", facts.python)
    table.add_row("platform", facts.platform)
    for name, found_version in facts.packages.items():
        table.add_row(name, found_version or "not installed")
    table.add_row("CUDA of torch", facts.cuda or "none (CPU build)")
    table.add_row("GPU", Text(f"{facts.gpu} ({facts.architecture})" if facts.gpu else "none"))
    console.print(table)
    table = Table("operation", "device", "backend", "why", title="What will run")
    for row in backends:
        table.add_row(*map(Text, row.values()))  # text, whose brackets are no markup
    console.print(table)
    for line in advice(facts):
        console.print(f"- {line}", markup=False, highlight=False)
