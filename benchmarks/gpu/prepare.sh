#!/usr/bin/env bash
# Where there is a network and no GPU: packs what a GPU machine may lack, and predicts all that will
# be measured there.
#
#     benchmarks/gpu/prepare.sh [VERSION OF PYTHON THERE, 3.12 by default]
#
# Wheels go to benchmarks/gpu/kit (a few MiB, ignored by git): copy the checkout with it. Predictions
# go to benchmarks/gpu/predictions.json, which is kept. PYTHON names the interpreter here, which has
# what the project needs.
set -euo pipefail

version=${1:-3.12}
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
kit=$root/benchmarks/gpu/kit
wanted=(msgspec rich markdown-it-py mdurl pygments jinja2 markupsafe safetensors)

rm -rf "$kit"
mkdir -p "$kit"
platforms=()
for each in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
  platforms+=(--platform "${each}_x86_64")
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
  --implementation cp "${platforms[@]}" -c "$root/constraints.txt" -d "$kit" "${wanted[@]}"
du -sh "$kit" >&2

cd "$root"
PYTHONPATH="$root/src:$root/benchmarks" OMP_NUM_THREADS=1 "$python" -m gpu.predict
