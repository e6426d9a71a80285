#!/bin/bash
# One routing of the study, or the loss curves, within LIMIT_S seconds. See README.md.
set -u
routing=${1:?a routing: natural, 1.2, 1.5, 2, 3, or curves}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
nproc=${NPROC:-8}
recipe=${RECIPE:-h200-ep8}
limit=${LIMIT_S:-570}
out=${OUT_DIR:-$root/benchmarks/results/train-$(basename "$recipe" .toml)}
mkdir -p "$out"
if [ "$routing" = curves ]; then
    exec timeout "$limit" python "$root/benchmarks/loss_curves.py" "$recipe" --nproc "$nproc" --steps "${STEPS:-200}" \
        --slots 1 --limit-s $((limit / 2 - 5)) --out "$out/curves.json" -- ${MORE:-}
fi
exec timeout "$limit" torchrun --nproc-per-node "$nproc" "$here/study.py" "$routing" --recipe "$recipe" \
    --layers "${LAYERS:-0}" --steps "${STEPS:-20}" --limit-s "$limit" --out "$out/$routing.json"
