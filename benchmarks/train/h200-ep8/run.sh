#!/bin/bash
# One routing of the study, or the loss curves, within LIMIT_S seconds. See README.md.
set -u
routing=${1:?a routing: natural, 1.2, 1.5, 2, 3, or curves}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
recipe=${RECIPE:-h200-ep8}
limit=${LIMIT_S:-570}
out=${OUT_DIR:-$root/benchmarks/results/train-$(basename "$recipe" .toml)}
file=$out/$routing.json
python=${PYTHON:-$(command -v python || command -v python3)}
mkdir -p "$out"

# Modes of a line share a process and take turns: what does not fit into the memory together is apart. Percent: the
# share of the time that is left which the line may take.
groups=("30 all_to_all" "40 off" "100 on-1 on-2 forced")
steps=20
if [ "$routing" = curves ]; then
    groups=("50 all_to_all" "100 on-1")
    steps=200
fi
if [ -n "${MODES:-}" ]; then
    groups=("100 $MODES") # into the file that is there
elif [ -e "$file" ]; then
    mv "$file" "$file.before"
fi

# Told to end, it ends the ranks first, which are in process groups of their own.
running=
trap '[ -z "$running" ] || { kill "$running" && wait "$running"; }; exit 143' TERM INT HUP

failed=0
for group in "${groups[@]}"; do
    read -r share modes <<<"$group"
    seconds=$(((limit - SECONDS) * share / 100))
    if [ "$seconds" -lt 30 ]; then
        echo "$routing: no time left for $modes" >&2
        failed=1
        continue
    fi
    # Time to end the ranks (30 s if they hang) before torchrun itself is killed, which would leave them behind.
    # shellcheck disable=SC2086  # one argument for each mode
    timeout -k 35 $((seconds - 15)) "$python" -m torch.distributed.run --nproc-per-node "${NPROC:-8}" "$here/study.py" "$routing" \
        --recipe "$recipe" --modes $modes --layers "${LAYERS:-0}" --steps "${STEPS:-$steps}" --limit-s "$seconds" --out "$file" &
    running=$!
    wait "$running"
    code=$?
    running=
    if [ "$code" -ne 0 ]; then
        echo "$routing: $modes ended with $code after $SECONDS s in all; what others measured stays in $file" >&2
        failed=1
    fi
done
exit "$failed"
