"""Run kernels that others proved on hardware, unmodified, under every completion policy.

    python tests/hardware/proven.py FOLDER ... --json FILE

A folder holds ``kernel.ptx``, ``launch.json`` (what ``blockscale emulate --args`` reads, with
outputs and what is expected of them) and ``data.npz``. Neither PTX nor data of other projects are
in this repository; benchmarks/results/emulator_proven.json has what came of them.

Where the checks refuse a kernel, it runs once more without them, and both outcomes are recorded.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from blockscale import emulator as em
from blockscale.cli.description import read_case
from blockscale.cli.emulate import examine
from blockscale.emulator.ptx.parse import parse


def run(folder: Path, completion: str, seed: int, check: str) -> dict[str, Any]:
    """One launch: whether the outputs are the expected ones, bit for bit, or the error."""
    text = (folder / "kernel.ptx").read_text()
    with np.load(folder / "data.npz") as file:
        data = {name: file[name] for name in file.files}
    case = read_case(parse(text), json.loads((folder / "launch.json").read_text()), data)
    device = em.Device(case.target, completion=completion, seed=seed, check=check)
    start = time.perf_counter()
    try:
        report = device.launch(
            text, case.entry, case.grid, case.block, case.args,
            cluster=case.cluster, shared=case.shared, buffers=case.buffers,
        )  # fmt: skip
    except em.PtxError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = [examine(name, case.arrays[name], case.expected[name]) for name in case.expected]
    return {
        "equal": all(output.equal for output in found),
        "outputs": {o.name: o.difference or "equal" for o in found},
        "threads x instructions": report.total,
        "seconds": round(time.perf_counter() - start, 2),
    }


def prove(folder: Path, seeds: int) -> dict[str, Any]:
    text = (folder / "kernel.ptx").read_text()
    description = json.loads((folder / "launch.json").read_text())
    module = parse(text)
    plan = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(seeds))]
    outcomes = {f"{policy} {seed}": run(folder, policy, seed, "all") for policy, seed in plan}
    failed = [name for name, outcome in outcomes.items() if not outcome.get("equal")]
    found: dict[str, Any] = {
        "kernel": folder.name,
        "sha256 of the PTX": hashlib.sha256(text.encode()).hexdigest()[:16],
        "target": ", ".join(module.target),
        "grid": description["grid"],
        "cluster": description["cluster"],
        "block": description["block"],
        "runs": len(outcomes),
        "equal": len(outcomes) - len(failed),
        "first": outcomes["eager 0"],
    }
    if failed:
        found["errors"] = {name: outcomes[name].get("error", "wrong") for name in failed[:3]}
        found["without checks"] = run(folder, "eager", 0, "none")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20, help="of the random policy")
    given = parser.parse_args()
    kernels = []
    for folder in given.folders:
        kernels.append(prove(folder, given.seeds))
        print(json.dumps(kernels[-1], indent=1), flush=True)
    result = {"date": datetime.date.today().isoformat(), "kernels": kernels}
    given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
