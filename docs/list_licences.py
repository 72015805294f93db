r"""List every installed package that Postil needs, with version, licence and home page, as a Markdown table.

    python docs/list_licences.py [EXTRA ...] > licences.md

All of it is what the packages say of themselves. A package that says nothing is listed as unknown, and the
exit code is 1: somebody has to look.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement


def needed(name: str, extras: frozenset[str], found: dict[str, Distribution]) -> None:
    """Add a package and all that it needs here."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return
    if key in found and not extras:
        return
    found[key] = package
    for text in package.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
        ):
            needed(requirement.name, frozenset(requirement.extras), found)


# The three places, newest first, in which a package may state its licence. Some paste its whole text.
def licence(package: Distribution) -> str:
    """Say under which licence a package stands."""
    metadata = package.metadata
    stated = metadata.get("License-Expression") or ""
    if not stated:
        classifiers = metadata.get_all("Classifier") or []
        stated = ", ".join(c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::"))
    if not stated:
        stated = (metadata.get("License") or "").strip().split("\n")[0][:60]
    return stated or "unknown"


def home(package: Distribution) -> str:
    """Say where a package lives."""
    urls = dict(
        [part.strip() for part in url.split(",", 1)] for url in package.metadata.get_all("Project-URL") or []
    )
    named = {key.lower(): url for key, url in urls.items()}
    for key in ("homepage", "source", "repository", "source code", "github"):
        if key in named:
            return named[key]
    return package.metadata.get("Home-page") or next(iter(urls.values()), "")


def main() -> int:
    """Print the table."""
    found: dict[str, Distribution] = {}
    needed("postil", frozenset(sys.argv[1:]), found)
    print("| package | version | licence | home |\n|---|---|---|---|")
    for name, package in sorted(found.items()):
        print(f"| {name} | {package.version} | {licence(package)} | {home(package)} |")
    return int(any(licence(package) == "unknown" for package in found.values()))


if __name__ == "__main__":
    sys.exit(main())
