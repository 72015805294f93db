r"""The learning curves of the committed comparison, as the README shows them.

python benchmarks/picture.py            draw docs/pictures/comparison.svg
python benchmarks/picture.py --check    say whether it is current
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from postil.comparing.chart import chart_file
from postil.comparing.report import curves

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/comparison.json"
PICTURE = ROOT / "docs/pictures/comparison.svg"


def picture(results: Path) -> str:
    """Draw bits over tokens: for each model the mean of its seeds, in the band between them."""
    document = json.loads(results.read_text(encoding="utf-8"))
    return chart_file(curves(document, 0), "tokens", document["unit"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is not current")
    chosen = parser.parse_args()
    if not RESULTS.exists():
        print(
            f"{RESULTS} is not there yet: it is the results.json that `postil compare` writes",
            file=sys.stderr,
        )
        return 2
    if chosen.check:
        current = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture(RESULTS)
        print(f"{PICTURE} is {'current' if current else 'stale: run benchmarks/picture.py'}")
        return 0 if current else 1
    PICTURE.write_text(picture(RESULTS), encoding="utf-8")
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
