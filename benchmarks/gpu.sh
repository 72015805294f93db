#!/bin/sh
# Every suite on one GPU, in less than eight minutes; results go to benchmarks/results/*-cuda.json.
#
#     benchmarks/gpu.sh                   in the peers' environment, .venv-peers
#     PYTHON=python3 benchmarks/gpu.sh    in any other that has torch; peers that are missing are left out
#     benchmarks/gpu.sh --quick           small sizes, also without a GPU: to see that all of it runs
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-.venv-peers/bin/python}
export PYTHONPATH=src

command -v "$PYTHON" >/dev/null || {
    echo "gpu.sh: there is no $PYTHON; make peers makes it, or PYTHON names another one" >&2
    exit 2
}
"$PYTHON" -c 'import torch' || {
    echo "gpu.sh: $PYTHON has no torch" >&2
    exit 2
}
case ${1-} in
--quick) quick=1 ;;
"") quick=0 ;;
*)
    echo "gpu.sh: $1 is no option; there is --quick" >&2
    exit 2
    ;;
esac
[ "$quick" = 1 ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "gpu.sh: $PYTHON finds no GPU that torch can use; with --quick it runs on the CPU" >&2
    exit 2
}

# A suite that runs out of time or fails must not take the others with it; the exit code counts those. The
# seconds add up to less than eight minutes.
failed=0
run() {
    seconds=$1
    shift
    [ "$quick" = 0 ] || seconds=1800
    echo "== $*"
    timeout "$seconds" "$PYTHON" "$@"
    code=$?
    [ "$code" = 0 ] || { echo "gpu.sh: $1 ended with $code (124: out of time)" >&2; failed=$((failed + 1)); }
}
run 60 benchmarks/attention.py --quick
run 105 benchmarks/aft.py --quick
run 125 benchmarks/feedback.py --quick
if [ "$quick" = 1 ]; then
    run 90 benchmarks/transformer.py --quick --threads 1
else
    run 90 benchmarks/transformer.py --rounds 5 --threads 1
fi
run 45 benchmarks/decode.py --quick
run 45 benchmarks/memory.py --quick
exit "$failed"
