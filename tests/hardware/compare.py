"""Everything the emulator supports of sm_90a, on a GPU and in the emulator: bit for bit.

    PYTHONPATH=src:tests/emulator python tests/hardware/compare.py emulate LAUNCHES
    PYTHONPATH=src:tests/emulator python tests/hardware/compare.py compare LAUNCHES \
        --record R.npz --json J.json

Every launch that the tests of the emulator make for sm_90a, the forms of cases.py, and its kernels
(kernels/*.cu, compiled with nvcc). The first command needs no GPU and takes minutes, the second one
takes a minute on a GPU. known.py says where the two may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import lzma
import pickle
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import known
import numpy as np
import ptx_forms
import pytest
from cases import Case, cases, extra_forms

from blockscale import emulator as em
from blockscale.emulator.isa.registry import families
from blockscale.emulator.memory.tensormap import TensorMap
from gpu import Gpu, GpuError, Map, Memory, Request, assembled, content, pack

HERE = Path(__file__).resolve().parent
#: Tests of the emulator alone: of its errors, its reading of text, its checks, the order and the
#: time in which it runs what is not ordered, its heap, and of sm_100a.
_NOT_FOR_A_GPU = (
    r"errors|parse|docs|cutedsl|tcgen05|tensorcore|tensormap|mutat|race|check|report|given|foreign"
    r"|programs|alarms|fence|undefined|poison|sentences|flags|litmus|exit|dependent|time|devices"
    r"|turns|resident|heap|spins"
)
_MOST_FAILURES = 25  # each costs a new context

Regions = tuple[bytes, ...]


@dataclass(frozen=True)
class Launch:
    """A launch and what the emulator made of its memory; ``failure`` says why it made nothing."""

    sort: str  # test, form or kernel
    name: str
    request: Request
    emulated: Regions | None
    opcodes: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Outcome:
    """equal, known, different, "gpu failed" or "not emulated"; and why, or where."""

    launch: Launch
    status: str
    detail: str = ""
    gpu: Regions | None = None


# --- launches -------------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest: keeps every launch for sm_90a that a test makes and that succeeds."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.skipped: Counter[str] = Counter()
        self.name = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.name = item.nodeid.split("/")[-1]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        original = em.Device.launch

        def launch(device: Any, ptx: str, name: str, grid: Any, block: Any, args: Any, **more: Any):
            packed = None
            with contextlib.suppress(TypeError, ValueError, AttributeError, StopIteration):
                where = {k: more[k] for k in ("cluster", "shared") if k in more}
                packed = pack(ptx, name, grid, block, args, **where)
            try:
                report = original(device, ptx, name, grid, block, args, **more)
            except Exception:
                self.skipped["the emulator refuses them, as the test wants"] += 1
                raise
            if more.keys() & {"variables", "buffers"}:
                self.skipped["with variables or buffers of the host"] += 1
            elif packed is None or device.target != "sm_90a" or "sm_100a" in ptx:
                self.skipped["not for sm_90a"] += 1
            else:
                request, memory = packed
                opcodes = tuple(report.instructions)
                self.launches.append(Launch("test", self.name, request, memory.read(), opcodes))
            return report

        em.Device.launch = launch  # type: ignore[method-assign]
        try:
            yield
        finally:
            em.Device.launch = original  # type: ignore[method-assign]


def of_tests(pattern: str) -> Recorder:
    """Run the tests of the emulator."""
    folder = HERE.parent / "emulator"
    paths = [str(p) for p in sorted(folder.glob(pattern)) if not re.search(_NOT_FOR_A_GPU, p.name)]
    recorder = Recorder()
    with recorder.watching():
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]
        options += ["-m", "not undefined"]
        pytest.main([*options, *paths], plugins=[recorder])
    return recorder


def form_request(form: ptx_forms.Form) -> tuple[Request, Memory, list[Any]]:
    """A form on its operands, as ``ptx_forms.check`` launches it."""
    operands = ptx_forms.tuples(form)
    arrays: list[Any] = [
        np.array(column, f"u{ptx_forms.bits(type) // 8}")
        for column, type in zip(zip(*operands, strict=True), form.operands, strict=True)
    ]
    arrays.append(np.zeros(len(operands), f"u{ptx_forms.bits(form.result) // 8}"))
    return *pack(ptx_forms.kernel(form), "form", 1, len(operands), arrays), arrays


def of_form(form: ptx_forms.Form) -> Launch:
    return emulate("form", str(form), *form_request(form))


def of_case(case: Case, ptx: str) -> Launch:
    args = case.arguments()
    request, memory = pack(
        ptx, case.entry, case.grid, case.block, args, cluster=case.cluster, shared=case.shared
    )
    return emulate("kernel", case.name, request, memory, args)


def _emulated_map(map: Map) -> TensorMap:
    fill = "nan" if map.nan_fill else "zeros"
    made = TensorMap.of(map.array, map.box[::-1], swizzle=map.swizzle, oob_fill=fill)
    whole = map.array if map.array.base is None else map.array.base  # contiguous
    return replace(made, array=whole)


def emulate(sort: str, name: str, request: Request, memory: Memory, args: list[Any]) -> Launch:
    args = [_emulated_map(a) if isinstance(a, Map) else a for a in args]
    try:
        report = em.Device("sm_90a").launch(
            request.ptx, request.name, request.grid, request.block, args,
            cluster=request.cluster, shared=request.shared,
        )  # fmt: skip
    except em.PtxError as error:
        return Launch(sort, name, request, None, failure=str(error))
    return Launch(sort, name, request, memory.read(), tuple(report.instructions))


def compiled(sources: Sequence[str]) -> dict[str, str]:
    """PTX of kernels/*.cu."""
    found = {}
    target = "-gencode=arch=compute_90a,code=compute_90a"
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            out = Path(folder) / "out.ptx"
            command = ["nvcc", "-ptx", target, f"{HERE}/kernels/{source}.cu", "-o", str(out)]
            subprocess.run(command, check=True, capture_output=True)
            found[source] = out.read_text()
    return found


# --- comparison -----------------------------------------------------------------------------------


def judge(launch: Launch, gpu: Regions | GpuError) -> Outcome:
    if isinstance(gpu, GpuError):
        return Outcome(launch, "gpu failed", str(gpu))
    if launch.emulated is None:
        return Outcome(launch, "not emulated", launch.failure, gpu)
    if gpu == launch.emulated:
        return Outcome(launch, "equal", "", gpu)
    for entry in known.KNOWN:
        if entry.covers(launch.name, launch.opcodes) and entry.same(launch, gpu):
            return Outcome(launch, "known", entry.reason, gpu)
    return Outcome(launch, "different", difference(launch, gpu), gpu)


def difference(launch: Launch, gpu: Regions) -> str:
    """Where the two differ, with the operands if it is a form."""
    assert launch.emulated is not None
    lines = []
    threads, is_form = launch.request.block[0], launch.request.name == "form"
    for i, (a, b) in enumerate(zip(gpu, launch.emulated, strict=True)):
        size = len(a) // threads if is_form else 4
        size = size if size in (1, 2, 4, 8) and len(a) % size == 0 else 1
        x, y = (np.frombuffer(v, f"u{size}") for v in (a, b))
        where = np.nonzero(x != y)[0]
        if len(where):
            lines.append(f"array {i}: {len(where)} of {len(x)} differ")
        for at in where[:8].tolist():
            operands = ""
            if is_form:
                columns = [
                    np.frombuffer(r, f"u{len(r) // threads}") for r in launch.request.regions
                ]
                operands = " of " + ", ".join(hex(column[at]) for column in columns[:-1])
            lines.append(f"  [{at}]{operands}: gpu {int(x[at]):#x}, emulator {int(y[at]):#x}")
    return "\n".join(lines)


def run_all(gpu: Gpu, launches: Sequence[Launch]) -> list[Outcome]:
    """Each different request once; stops after many failures."""
    unique = {launch.request.key(): launch.request for launch in launches}
    ready = dict(zip(unique, assembled(list(unique.values())), strict=True))
    results: dict[str, Regions | GpuError] = {}
    outcomes: list[Outcome] = []
    for launch in launches:
        key = launch.request.key()
        if key not in results:
            if sum(isinstance(r, GpuError) for r in results.values()) >= _MOST_FAILURES:
                results[key] = GpuError("not run: too many failures before")
            else:
                try:
                    results[key] = gpu.run(ready[key])
                except GpuError as error:
                    results[key] = error
        outcomes.append(judge(launch, results[key]))
    return outcomes


# --- results --------------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome], skipped: Counter[str]) -> dict[str, Any]:
    forms = [o for o in outcomes if o.launch.request.name == "form"]
    opcodes = {opcode for o in outcomes for opcode in o.launch.opcodes}
    compared = [o for o in outcomes if o.status in ("equal", "known")]
    return {
        "launches": {
            sort: dict(Counter(o.status for o in outcomes if o.launch.sort == sort))
            for sort in ("test", "form", "kernel")
        },
        "instruction forms": len({o.launch.name for o in forms}),
        "operand tuples": sum(o.launch.request.block[0] for o in forms),
        "bytes compared": sum(len(r) for o in compared for r in o.launch.request.regions),
        "opcodes executed": len(opcodes),
        "families not executed": [
            f
            for f in families()
            if not f.startswith("tcgen05") and not any(f"{o}.".startswith(f"{f}.") for o in opcodes)
        ],
        "launches not made on the GPU": dict(skipped),
        "known differences": dict(Counter(o.detail for o in outcomes if o.status == "known")),
        "others": [
            {"name": o.launch.name, "status": o.status, "detail": o.detail}
            for o in outcomes
            if o.status not in ("equal", "known")
        ],
    }


def record(outcomes: Sequence[Outcome], path: Path) -> None:
    """Hashes of what the GPU gave, by the request's key or the kernel's name."""
    found = {
        o.launch.name if o.launch.sort == "kernel" else o.launch.request.key(): content(o.gpu)
        for o in outcomes
        if o.gpu is not None and o.status != "known"
    }
    names = sorted(found)
    digests = np.array([int(found[n], 16) for n in names], np.uint64)
    np.savez_compressed(path, names=names, digests=digests)


def versions() -> dict[str, str]:
    """Of the driver and of nvcc."""

    def said(*command: str) -> list[str]:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )

    query = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {"driver": query[0], "nvcc": said("nvcc", "--version")[3].split("V")[-1]}


def kept(tests: str, path: Path) -> None:
    """Run the tests and the forms, and keep their launches in a file."""
    recorder = of_tests(tests)
    launches = [*recorder.launches, *map(of_form, extra_forms())]
    with lzma.open(path, "wb", preset=1) as file:
        pickle.dump((launches, recorder.skipped), file)
    print(f"{path}: {len(launches)} launches, {path.stat().st_size >> 10} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("emulate", "compare"))
    parser.add_argument("launches", type=Path, help="of tests and forms; made by emulate")
    parser.add_argument("--record", type=Path, help="hashes of what the GPU gave")
    parser.add_argument("--json", type=Path, help="versions, counts, differences")
    parser.add_argument("--full", type=Path, help="what kernels gave, and what differs, in full")
    parser.add_argument("--tests", default="test_*.py", help="of tests/emulator, for emulate")
    given = parser.parse_args()
    if given.command == "emulate":
        return kept(given.tests, given.launches)
    if not (given.record and given.json):
        parser.error("compare: --record and --json are missing")
    with lzma.open(given.launches) as file:
        launches, skipped = pickle.load(file)
    every = cases()
    ptx = compiled(sorted({case.source for case in every}))
    launches += [of_case(case, ptx[case.source]) for case in every]
    with Gpu() as gpu:
        about = {
            "what": "memory after a launch on the GPU and in the emulator, compared bit for bit",
            "date": datetime.date.today().isoformat(),
            **gpu.info(),
            **versions(),
        }
        outcomes = run_all(gpu, launches)
    record(outcomes, given.record)
    if given.full:
        whole = [o for o in outcomes if o.launch.sort == "kernel" or o.status != "equal"]
        arrays = {f"{o.launch.name}:{i}": r for o in whole for i, r in enumerate(o.gpu or ())}
        np.savez_compressed(
            given.full, **{k: np.frombuffer(v, np.uint8) for k, v in arrays.items()}
        )
    found = about | summary(outcomes, skipped)
    given.json.write_text(json.dumps(found, indent=2) + "\n")
    for other in found.pop("others"):
        print(f"{other['status']}: {other['name']}\n{other['detail'][:500]}")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
