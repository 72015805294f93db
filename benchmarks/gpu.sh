#!/bin/sh
# Every suite on one GPU, in less than eight minutes; results go to benchmarks/results/*-cuda.json.
#
#     benchmarks/gpu.sh                   in the peers' environment, .venv-peers
#     PYTHON=python3 benchmarks/gpu.sh    in any other that has torch; peers that are missing are left out
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-.venv-peers/bin/python}
export PYTHONPATH=src

"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "gpu.sh: $PYTHON finds no GPU that torch can use" >&2
    exit 2
}

# A suite that runs out of time or fails must not take the others with it; the exit code counts those.
failed=0
for suite in "transformer.py --rounds 5" "aft.py --quick" "feedback.py --quick"; do
    echo "== $suite"
    # shellcheck disable=SC2086
    timeout 155 "$PYTHON" benchmarks/$suite || { echo "gpu.sh: $suite ended with $?" >&2; failed=$((failed + 1)); }
done
exit "$failed"
