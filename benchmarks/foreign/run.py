"""Run kernels of other projects, unmodified, under every completion policy with all checks.

    python benchmarks/foreign/run.py FOLDER [NAME ...] --json FILE

FOLDER holds their PTX as their own builds make it, ``<project>/<kernel>.ptx``; the files beside
this one say in words how each is made, build its arguments and know the right answer. None of their
code is in this repository. NAMEs are of kernels or projects; results of others in FILE stay.

Alarms are collected. Those that name a fault of the kernel by the PTX ISA have an entry with the
reason in ``<project>.suppress`` beside this file; a kernel holds where every run is right and has
no other alarm. A check that accuses a kernel of what is no fault is off for it, and the results say
why (``Foreign.off``).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # not this folder: it has a triton.py
from foreign.kernel import Foreign  # noqa: E402

from blockscale import emulator as em  # noqa: E402


def kernels() -> list[Foreign]:
    """Those of every file here that lists some."""
    names = sorted(file.stem for file in HERE.glob("*.py") if file.stem != "run")
    modules = [importlib.import_module(f"foreign.{name}") for name in names]
    return [kernel for module in modules for kernel in getattr(module, "KERNELS", ())]


def outcome(kernel: Foreign, ptx: str, folder: Path, completion: str, seed: int) -> dict[str, Any]:
    """Of one run: right, wrong, or what the emulator refused; and its alarms."""
    known = HERE / f"{kernel.project.lower()}.suppress"
    device = em.Device(
        kernel.target,
        completion=completion,
        seed=seed,
        check=kernel.checks,
        on_error="collect",
        suppress=known if known.exists() else (),
    )
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        right, reports = kernel.launch(device, ptx, folder)
    except em.PtxError as error:
        found["said"] = f"{type(error).__name__}: {error}"
    else:
        found["said"] = "right" if right else "wrong"
        alarms = [alarm for report in reports for alarm in report.alarms]
        left_out = [entry for report in reports for entry in report.suppressed if entry.count]
        found["alarms"] = [f"{a.kind} at {a.place}, {a.count} times: {a.message}" for a in alarms]
        found["suppressed"] = [f"{s.entry}, {s.count} times: {s.reason}" for s in left_out]
    found["seconds"] = round(time.perf_counter() - start, 2)
    return found


def prove(kernel: Foreign, folder: Path, seeds: int) -> dict[str, Any]:
    """A kernel under eager, late and ``seeds`` random orders."""
    ptx = kernel.ptx(folder)
    orders = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(seeds))]
    runs = {}
    for completion, seed in orders:
        found = outcome(kernel, ptx, folder, completion, seed)
        if "alarms" in found:  # sources lie in the folder, wherever that is
            found["alarms"] = [a.replace(f"{folder.resolve()}/", "") for a in found["alarms"]]
        runs[f"{completion} {seed}"] = found
        print(f"{kernel.name:32} {completion} {seed}: {json.dumps(found)}", flush=True)
    return {
        "project": kernel.project,
        "version": kernel.version,
        "target": kernel.target,
        "made": kernel.made,
        **({"checks that are off": dict(kernel.off)} if kernel.off else {}),
        "sha256 of the PTX": hashlib.sha256(ptx.encode()).hexdigest(),
        "holds": all(run["said"] == "right" and not run["alarms"] for run in runs.values()),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, help="without it nothing is written")
    parser.add_argument("--seeds", type=int, default=5, help="of the random policy")
    given = parser.parse_args()
    chosen = [k for k in kernels() if not given.names or {k.name, k.project} & set(given.names)]
    if unknown := set(given.names) - {n for k in kernels() for n in (k.name, k.project)}:
        parser.error(f"NAME: no kernel or project {', '.join(sorted(unknown))}")
    old: dict[str, Any] = {}
    if given.json and given.json.exists():
        old = json.loads(given.json.read_text())["kernels"]
    for kernel in chosen:
        old[kernel.name] = prove(kernel, given.folder, given.seeds)
        if given.json:
            result = {
                "what": "kernels of other projects, unmodified, with all default checks but some",
                "date": datetime.date.today().isoformat(),
                "kernels": dict(sorted(old.items())),
            }
            given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
