r"""Project: which files become pages, at which addresses, in which order.

Settings come from a `pages.toml` beside the package or above it, everything in it optional:

```toml
title = "Postil"
order = ["masks", "mixer", "mixers.multi_head_attention"]
exclude = ["vendored"]
languages = ["zh_CN", "ja"]
locale = "locale"
papers = "papers.toml"
lock = "locale/anchors.json"
base_url = "https://example.org/postil/"
repository = "https://github.com/example/postil"
notebooks = "notebooks"
stylesheet = "site.css"
```
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from postil.pages.prose import Reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

__all__ = ["Module", "Project", "ProjectError", "open_project", "source_copy"]


class ProjectError(ValueError):
    r"""A setting or a folder that cannot be used; the message says which and what would do."""


@dataclass(frozen=True)
class Module:
    r"""One source file: where it is, its dotted name inside the project, the address of its page."""

    file: Path
    path: str
    name: str
    url: str

    @property
    def is_package(self) -> bool:
        r"""True for an `__init__.py`."""
        return self.path.rpartition("/")[2] == "__init__.py"


@dataclass(frozen=True)
class Project:
    r"""Everything a build reads besides the sources themselves."""

    root: Path
    home: Path
    title: str
    modules: tuple[Module, ...]
    papers: dict[str, Reference] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    commit: str = ""

    @property
    def has_settings(self) -> bool:
        r"""True for a project with a `pages.toml`: one that was written for this publisher."""
        return (self.home / "pages.toml").is_file()

    @property
    def languages(self) -> list[str]:
        r"""Languages of the site besides English, as locale names."""
        return list(self.settings.get("languages", ()))

    @property
    def locale(self) -> Path:
        r"""Where translations live."""
        return self.home / str(self.settings.get("locale", "locale"))

    def source_link(self, module: Module) -> str:
        r"""The file at its commit, or nothing where no repository is named; see `source_copy`."""
        repository = str(self.settings.get("repository", "")).rstrip("/")
        if not repository or not self.commit:
            return ""
        return f"{repository}/blob/{self.commit}/{module.file.relative_to(self.home).as_posix()}"


def source_copy(module: Module) -> str:
    r"""Where a site keeps a source for its readers, if no repository does; browsers show text, not `.py`."""
    return f"_sources/{module.path}.txt"


_SETTINGS = {
    "title": str, "description": str, "order": list, "exclude": list, "languages": list, "locale": str,
    "papers": str, "lock": str, "base_url": str, "repository": str, "notebooks": str, "stylesheet": str,
}  # fmt: skip


def open_project(path: Path, **overrides: Any) -> Project:
    r"""Look at a package, a folder or a single file; nothing is imported.

    `overrides` are settings that win over those of `pages.toml`.

    Raises:
        ProjectError: there is no Python file at `path`, or a setting is unknown or of the wrong type.
    """
    if not path.exists():
        raise ProjectError(f"{path} does not exist")
    root = path.resolve()
    base = root.parent if root.is_file() else root
    home = _upwards(base, "pages.toml", "pyproject.toml", ".git") or base
    settings = _settings(home / "pages.toml")
    settings.update({key: value for key, value in overrides.items() if value is not None})
    files = [root] if root.is_file() else _python_files(root, set(settings.get("exclude", ())))
    if not files:
        raise ProjectError(f"{path} holds no Python file")
    paths = [file.relative_to(base).as_posix() for file in files]
    urls = _urls(paths)
    modules = [Module(f, p, _dotted(p), urls[p]) for f, p in zip(files, paths, strict=True)]
    title = settings.get("title") or (base.name if not root.is_file() else root.stem)
    papers = _papers(_papers_file(home, base, settings))
    return Project(
        base, home, title, _ordered(modules, settings.get("order", ())), papers, settings, _commit(home)
    )


def _upwards(start: Path, *names: str) -> Path | None:
    for name in names:
        found = next((folder for folder in (start, *start.parents) if (folder / name).exists()), None)
        if found:
            return found
    return None


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ProjectError(f"{file}: {error}") from error
    for key, value in settings.items():
        if key not in _SETTINGS:
            raise ProjectError(f"{file}: unknown setting {key!r}; known are {', '.join(sorted(_SETTINGS))}")
        if not isinstance(value, _SETTINGS[key]):
            raise ProjectError(f"{file}: {key} = {value!r} should be a {_SETTINGS[key].__name__}")
    return settings


# Links are not followed: a link to a folder above would make a site of the whole disk.
def _python_files(root: Path, exclude: set[str]) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in ("__pycache__", *exclude))
        for name in files:
            file = Path(folder, name)
            stem = name.removesuffix(".py")
            if (
                name.endswith(".py")
                and not name.startswith(".")
                and stem not in exclude
                and not file.is_symlink()
            ):
                found.append(file)
    return sorted(found)


def _dotted(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# A package's page is the index of its folder. Two files may not share an address even where the disk takes
# capital letters for small ones, and none may take the index's or the search page's place: then the address
# carries the full file name, or a piece of the path's hash.
def _urls(paths: list[str]) -> dict[str, str]:
    wanted = {
        p: p.removesuffix("__init__.py") + "index.html" if _is_init(p) else p[:-3] + ".html" for p in paths
    }
    taken: dict[str, list[str]] = {"index.html": [""], "search.html": [""], "404.html": [""]}
    for path, url in wanted.items():
        taken.setdefault(url.casefold(), []).append(path)
    result = {}
    for path, url in wanted.items():
        rivals = [p for p in taken[url.casefold()] if p != path and not (p == "" and path == "__init__.py")]
        if (
            not rivals
            or _is_init(path)
            or (path == path.casefold() and not any(p == "" or _is_init(p) for p in rivals))
        ):
            result[path] = url
        else:
            digest = hashlib.sha256(path.encode()).hexdigest()[:8]
            result[path] = f"{path}.html" if path == path.casefold() else f"{path[:-3]}-{digest}.html"
    return result


def _is_init(path: str) -> bool:
    return PurePosixPath(path).name == "__init__.py"


# Listed names come first among their siblings, in the order of the list; the others follow by name.
def _ordered(modules: list[Module], order: Sequence[str]) -> tuple[Module, ...]:
    rank = {name: i for i, name in enumerate(order)}

    def key(module: Module) -> list[tuple[int, str]]:
        parts = module.name.split(".") if module.name else []
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return [(rank.get(name, len(rank)), name) for name in prefixes]

    return tuple(sorted(modules, key=key))


def _papers_file(home: Path, base: Path, settings: dict[str, Any]) -> Path | None:
    if "papers" in settings:
        file = home / settings["papers"]
        if not file.is_file():
            raise ProjectError(f"papers: {file} does not exist")
        return file
    folder = _upwards(base, "papers.toml")
    return folder / "papers.toml" if folder else None


def _papers(file: Path | None) -> dict[str, Reference]:
    if file is None:
        return {}
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ProjectError(f"{file}: {error}") from error
    papers = {}
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("title", "url")):
            raise ProjectError(f"{file}: [{key}] needs at least title and url")
        papers[key] = Reference(entry["url"], entry["title"], _short(entry))
    return papers


def _short(entry: dict[str, Any]) -> str:
    authors = entry.get("authors", "")
    names = (
        authors if isinstance(authors, list) else [a.strip() for a in str(authors).split(",") if a.strip()]
    )
    surname = names[0].split()[-1] if names else entry["title"]
    others = " et al." if len(names) > 2 else f" and {names[1].split()[-1]}" if len(names) == 2 else ""
    return f"{surname}{others} {entry.get('year', '')}".strip()


def _commit(home: Path) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(home), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
