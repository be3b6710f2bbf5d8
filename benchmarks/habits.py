"""Random modules under random habits, sharded at random on one to four ranks, beside the same held
whole: clipping, loss scaling, recomputation, averages, freezing, copies, states, accumulation.

    python benchmarks/habits.py --machine cpu-2-cores --trials 1000

writes ``validation/<machine>/habits.json``: how many trials there were on each number of ranks, and
every one that differs by more than 1e-9 or raises, with its seed. The trials are those of
``tests/distributed/random_habit_tasks.py``, of which the tests run 60.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "distributed"))
AT_ONCE = 5


def main() -> int:
    from pool import WORLD_SIZE, Pool
    from random_habit_tasks import STEPS, differing

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", required=True, help="the folder under validation/")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    options = parser.parse_args()
    pool = Pool()
    found: list[str] = []
    counts = dict.fromkeys(range(1, WORLD_SIZE + 1), 0)
    end = options.first + options.trials
    try:
        for number, first in enumerate(range(options.first, end, AT_ONCE)):
            size = number % WORLD_SIZE + 1
            seeds = list(range(first, min(first + AT_ONCE, end)))
            for rank, differs in enumerate(pool.run(size, differing, seeds=seeds)):
                found += [f"{size} ranks, rank {rank}, seed {each}" for each in differs]
            counts[size] += len(seeds)
            print(f"{sum(counts.values())} trials, {len(found)} differ", end="\r", flush=True)
    finally:
        pool.close()
    path = ROOT / "validation" / options.machine / "habits.json"
    results = {
        "trials_by_ranks": counts,
        "first_seed": options.first,
        "steps": STEPS,
        "differing": found,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
