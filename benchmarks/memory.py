r"""Peak memory of a training pass, measured: attention, AFT and the Feedback Transformer.

Each figure is the high-water mark of a fresh process, above what it took before the pass, in bytes and in
tensors of the input's size. `--quick` takes a minute or two, `--full` goes on to longer texts. The parts are
those of the suites `attention`, `aft` and `feedback`.
"""

from __future__ import annotations

import argparse

import aft
import attention
import feedback
from measure import write_results

# D, L, T, B of the Feedback Transformer and of the parallel one it is measured beside.
SMALL, MIDDLE, LONG = (128, 4, 128, 32), (256, 6, 128, 32), (256, 6, 512, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short texts (the default)")
    parser.add_argument("--full", action="store_true", help="texts of up to 16,384 positions")
    chosen = parser.parse_args()
    lengths = [1024, 4096, 16384] if chosen.full else [256, 1024]
    rows = [*attention.memory(lengths), *aft.memory(lengths)]
    rows += feedback.memory([SMALL, MIDDLE, LONG] if chosen.full else [SMALL])
    print(write_results("memory" if chosen.full else "memory-quick", rows, attention.PACKAGES))


if __name__ == "__main__":
    main()
