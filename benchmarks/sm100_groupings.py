"""Products of random groups for Blackwell in the emulator, each in some order of completion.

    PYTHONPATH=src python3 benchmarks/sm100_groupings.py benchmarks/results/sm100_groupings.json

Each is compared bit for bit with the arithmetic of the tensor cores; a run that returns has no
races, and leaves nothing behind.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
COUNT = 200


def right(seed: int) -> bool:
    sys.path[:0] = [str(TESTS), str(TESTS / "kernels"), str(TESTS / "emulator")]
    from sm100_groups import check_random

    return bool(check_random(random.Random(seed), seed))


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(right, range(COUNT)))
    what = "random groups of rows, masked and along K, for Blackwell in the emulator"
    content = {"what": what, "date": str(date.today()), "runs": COUNT, "right": sum(found)}
    Path(sys.argv[1]).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
