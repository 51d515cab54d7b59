"""The cache of compiled kernels on a GPU: a first call, a second process, eight at once, damage.

    PYTHONPATH=src python3 benchmarks/gpu_cache.py FILE.json

Every line is a fresh process with a cache folder of this script's choice. Times are those of the
first call of bs.quantize, with torch and blockscale imported and CUDA started before; the import of
CuTe DSL within it is also told apart.
"""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def child(barrier: str) -> None:
    import torch

    import blockscale as bs
    from blockscale.kernels.common import compile_cache

    x = torch.randn(256, 7168, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    torch.cuda.synchronize()
    spent: dict[str, float] = {}
    original, active = builtins.__import__, []

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        if active or name.split(".")[0] != "cutlass":
            return original(name, *args, **kwargs)
        active.append(name)
        begun = time.perf_counter()
        try:
            return original(name, *args, **kwargs)
        finally:
            active.pop()
            spent["cutlass"] = spent.get("cutlass", 0.0) + time.perf_counter() - begun

    compiles = []
    build = compile_cache.build
    compile_cache.build = lambda config: compiles.append(config) or build(config)  # type: ignore[func-returns-value]
    if barrier:
        (Path(barrier) / f"ready{os.getpid()}").touch()
        while not (Path(barrier) / "go").exists():
            time.sleep(0.001)
    builtins.__import__ = watched
    begun = time.perf_counter()
    q = bs.quantize(x, layout="tcgen05", backend="kernel")
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    builtins.__import__ = original
    want = bs.quantize(x, layout="tcgen05", backend="reference")
    pairs = ((q.qdata, want.qdata), (q.scale, want.scale))
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    found = {
        "first_call_s": took,
        "import_of_cute_dsl_s": spent.get("cutlass", 0.0),
        "kernels_compiled": len(compiles),
        "same_bytes": same,
    }
    print(json.dumps(found))


def spawn(cache: Path, barrier: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"BLOCKSCALE_CACHE_DIR": str(cache)}
    command = [sys.executable, __file__, "--child", barrier]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=180)
    if process.returncode:
        raise RuntimeError(f"a child ended with {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def main(target: Path) -> None:
    place = Path(tempfile.mkdtemp())
    found: dict[str, Any] = {}

    def keep(name: str, result: Any) -> None:
        found[name] = result
        print(name, result, flush=True)

    finish(spawn(place / "warm"))  # Python's own compiled files
    keep("empty cache", finish(spawn(place / "one")))
    keep("second process", finish(spawn(place / "one")))
    keep("third process", finish(spawn(place / "one")))
    barrier = place / "barrier"
    barrier.mkdir()
    eight = [spawn(place / "eight", str(barrier)) for _ in range(8)]
    while len(list(barrier.glob("ready*"))) < 8:
        time.sleep(0.01)
    (barrier / "go").touch()
    results = [finish(each) for each in eight]
    keep(
        "eight processes at once, empty cache",
        {
            "slowest_first_call_s": max(each["first_call_s"] for each in results),
            "kernels_compiled": sum(each["kernels_compiled"] for each in results),
            "same_bytes": all(each["same_bytes"] for each in results),
        },
    )
    for path in (place / "one").rglob("*.so"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    keep("one bit of the entry flipped", finish(spawn(place / "one")))
    keep("the process after it", finish(spawn(place / "one")))
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
