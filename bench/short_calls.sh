#!/usr/bin/env bash
# What limits short calls on this GPU: quantisation, the host's time of a call, and the crossover against torch.
# Usage: bench/short_calls.sh [--check-only] (compiles and checks, and times nothing); about 40 s once that has run.
set -uo pipefail
cd "$(dirname "$0")"
python3 bench_quantise_stage.py "$@"
python3 bench_launch.py "$@"
cases=$(for d in 128 64; do for n in 2048 3072 4096 1024 6144 1536; do printf 'crossover-d%s-%s,' $d $n; done; done)
python3 bench_attention.py --quick --deadline 22 --cases "${cases%,}" --masks none,fade --impls int8,torch \
    --variants call,graph "$@"
