"""Whether `plan`, `memory` and `fit` contradict one another of small random jobs whose memory is
just enough or a little less, ten llamas among two hundred.

    python benchmarks/verdicts.py --machine cpu-2-cores --jobs 200

writes ``validation/<machine>/verdicts.json``: how many jobs of each kind had which verdict, and
every contradiction with its seed. The jobs are those of ``tests/planner/random_verdicts.py``, of
which the tests ask eight.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "planner"))


def main() -> int:
    from random_verdicts import said_of

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--machine", required=True, help="the folder under validation/")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    verdicts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    contradictions = []
    path = ROOT / "validation" / options.machine / "verdicts.json"
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.jobs):
            found = said_of(seed, Path(folder))
            kinds[found["kind"]] += 1
            verdicts[found["said"]["memory"]] += 1
            contradictions += [found] if found["wrong"] else []
            results = {
                "jobs": sum(kinds.values()),
                "first_seed": options.first,
                "kinds": dict(kinds),
                "verdicts": dict(verdicts),
                "contradictions": contradictions,
                "date": datetime.date.today().isoformat(),
            }
            # After every job: a run that is stopped has what it found so far.
            path.write_text(json.dumps(results, indent=1) + "\n")
            told = f"{results['jobs']} jobs, {len(contradictions)} contradictions"
            print(told, end="\r", file=sys.stderr, flush=True)
    print(json.dumps(results))
    return bool(contradictions)


if __name__ == "__main__":
    sys.exit(main())
