"""Compare the emulator's race checks with the memory model of the ISA on random programs.

    python benchmarks/emulator_litmus.py [first [last]]  # seeds

writes benchmarks/results/emulator_litmus.json. For what the numbers count see Verdict of
tests/emulator/litmus.py.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "emulator"))
from litmus import Program, verdict  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "emulator_litmus.json"
SEEDS = 0, 10000
COUNTED = ("false", "missed", "mistaken", "repeated", "outdated", "decided")


def main(first: int, last: int) -> None:
    programs: Counter[str] = Counter()
    pairs: Counter[str] = Counter()
    seeds: dict[str, list[int]] = {kind: [] for kind in COUNTED}
    before = os.times()
    for seed in range(first, last):
        found = verdict(Program(seed))
        programs["racy by the model"] += found.racy
        programs["with an alarm that is a race"] += bool(found.found)
        pairs["alarms that are races"] += len(found.found)
        for kind in COUNTED:
            if pair := getattr(found, kind):
                seeds[kind].append(seed)
                pairs[kind] += len(pair)
        if (seed + 1 - first) % 500 == 0:
            print(f"{seed + 1 - first} programs: {dict(programs)} {dict(pairs)}", flush=True)
    after = os.times()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "seeds": [first, last],
        "programs": {"all": last - first, **programs},
        "pairs of lines": {kind: pairs[kind] for kind in ("alarms that are races", *COUNTED)},
        "seeds of": seeds,
        "CPU seconds": round(after.user + after.system - before.user - before.system, 1),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:3]]
    main(*(given + list(SEEDS[len(given) :])))
