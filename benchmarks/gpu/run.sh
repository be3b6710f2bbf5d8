#!/usr/bin/env bash
# On a machine with a GPU, with or without a network:
#
#     benchmarks/gpu/run.sh [--seconds 420] [--stages memory,seconds] [--device cpu --small]
#
# measures what is claimed of it and writes JSON files into $OUT (by default gpu-figures), row by row,
# so that a run that is cut off leaves what it has. It takes the machine's own torch, changes nothing
# of the card, and adds from benchmarks/gpu/kit what the machine lacks. --seconds 60 does one row of
# every stage: first that, then the long run.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
added=$(mktemp -d)
trap 'rm -rf "$added"' EXIT
export PYTHONPATH="$root/src:$root/benchmarks:$added${PYTHONPATH:+:$PYTHONPATH}"
export OUT=${OUT:-$PWD/gpu-figures} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

"$python" -m gpu.kit "$added"
cd "$root"
"$python" -m gpu.run "$@"
