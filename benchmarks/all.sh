#!/usr/bin/env bash
# Every CPU benchmark, one after the other, on an otherwise idle machine: under 20 minutes on two cores.
#   bash benchmarks/all.sh [options of the benchmarks, such as --model DIR or --rounds 5]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
export HF_HUB_OFFLINE=1
uptime
for name in decode rollout ragged latency update head growth; do
    echo "--- $name"
    start=$SECONDS
    "$python" -W ignore -m "benchmarks.$name" "$@" 2> >(grep -v -i "warn\|kernels-community" >&2)
    echo "($name took $((SECONDS - start)) s)"
done
uptime
