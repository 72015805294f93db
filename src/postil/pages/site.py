r"""Site: all pages of a project in all its languages, with what they share.

A build reads every file, writes what has changed since the last one and takes over the rest, checks that
every link it wrote leads somewhere, and only then shows itself. Equal sources give equal bytes: no time, no
machine and no order of a set gets into a page.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from postil.pages import anchors as anchoring
from postil.pages import interface
from postil.pages.catalogue import Catalogue, po_file, read_catalogue
from postil.pages.furniture import write_furniture
from postil.pages.linking import Links
from postil.pages.project import Project
from postil.pages.prose import Context
from postil.pages.reading import Fault, Page, read_page
from postil.pages.searching import search_entries
from postil.pages.sheet import Sheet, page_html
from postil.pages.staging import MANIFEST, staged
from postil.pages.tracing import Trace, example_of, run_example
from postil.pages.writing import Surroundings, write_page

__all__ = ["BuildError", "Built", "build_site"]


class BuildError(ValueError):
    r"""A build that was given up because of faults in the sources; prints one a line."""

    def __init__(self, faults: list[Fault]):
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


@dataclass
class Built:
    r"""What a build did."""

    pages: int = 0
    written: int = 0
    reused: int = 0
    warnings: list[Fault] = field(default_factory=list)


Entry = dict[str, Any]


def build_site(
    project: Project, out: Path, *, lenient: bool = False, run: bool = False, keep_lock: bool = True
) -> Built:
    r"""Build the site of a project into `out`.

    `lenient` shows what cannot be set or found and goes on; otherwise such a fault ends the build. `run`
    runs the pages' examples; nothing of the project is imported without it.

    Raises:
        BuildError: a formula is wrong, a link leads nowhere, a page cites an unknown paper.
        StagingError: `out` cannot be used.
    """
    pages = [read_page(project, module) for module in project.modules]
    _refuse_language_folders(project)
    lock_file = project.home / project.settings["lock"] if "lock" in project.settings else None
    with staged(out) as stage:
        old = _manifest(out)
        lock = anchoring.read_lock(lock_file) if lock_file else old.get("anchors", {})
        traces = _traces(project, pages, old.get("traces", {})) if run else {}
        builder = _Builder(project, pages, out.resolve(), stage, old.get("pages", {}), lock, traces)
        built = builder.run()
        errors = [fault for fault in builder.faults if not fault.is_warning]
        if errors and not lenient:
            raise BuildError(errors)
        built.warnings = builder.faults
        for page in pages:
            anchoring.merged(lock, page.module.url, page.anchors())
        if lock_file and keep_lock:
            anchoring.write_lock(lock_file, lock)
        manifest = {
            "anchors": lock,
            "pages": builder.entries,
            "traces": {k: asdict(t) for k, t in traces.items()},
        }
        text = json.dumps(manifest, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        (stage / MANIFEST).write_text(text, encoding="utf-8")
    return built


def _refuse_language_folders(project: Project) -> None:
    folders = {module.path.split("/")[0].casefold() for module in project.modules}
    for language in map(interface.tag, project.languages):
        if language.casefold() in folders:
            raise ValueError(f"the folder {language!r} of the project has the name of a language of the site")


def _manifest(out: Path) -> dict[str, Any]:
    try:
        return json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# An example may use any file of the project, so its trace is kept as long as none of them has changed.
def _traces(project: Project, pages: list[Page], known: dict[str, Any]) -> dict[str, Trace]:
    sources = _digest(*(_bytes(module.file) for module in project.modules))
    traces = {}
    for page in pages:
        if example_of(page):
            key = f"{page.module.name}:{_digest(sources, page.module.name)}"
            if key in known:
                shapes = {int(line): shape for line, shape in known[key]["shapes"].items()}
                traces[key] = Trace(shapes, known[key]["plots"])
            else:
                traces[key] = run_example(project, page)
    return traces


@dataclass
class _Builder:
    project: Project
    pages: list[Page]
    out: Path
    stage: Path
    known: dict[str, Entry]
    lock: dict[str, dict[str, str]]
    traces: dict[str, Trace]
    entries: dict[str, Entry] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def run(self) -> Built:
        built = Built(pages=len(self.pages))
        links = Links(self.project, self.pages)
        base = _fingerprint(self.project, links)
        self.faults += [fault for page in self.pages for fault in page.faults]
        self.faults += [fault for trace in self.traces.values() for fault in trace.faults]
        for language in ["en", *self.project.languages]:
            titles = self._titles(language)
            for position, page in enumerate(self.pages):
                key = f"{language}:{page.module.url}"
                entry = self._one(language, position, page, links, base, titles)
                built.written += not entry.pop("reused", False)
                self.entries[key] = entry
                self.faults += [Fault(*fault) for fault in entry["faults"]]
        built.reused = len(self.entries) - built.written
        self.faults += links.broken(self.entries)
        self.faults = list(dict.fromkeys(self.faults))
        write_furniture(self.project, self.pages, self.stage, self.entries, links.media)
        return built

    def _titles(self, language: str) -> dict[str, tuple[str, str]]:
        titles = {}
        for page in self.pages:
            po = po_file(self.project.locale, language, page.module.name)
            say = read_catalogue(po, language).translate if language != "en" else str
            title, description = page.front.title, page.front.description
            name = page.module.name or self.project.title
            said = (say(description) or description) if description else ""
            titles[page.module.url] = ((say(title) or title) if title else name, said)
        return titles

    def _one(
        self,
        language: str,
        position: int,
        page: Page,
        links: Links,
        base: str,
        titles: dict[str, tuple[str, str]],
    ) -> Entry:
        name = page.module.url if language == "en" else f"{interface.tag(language)}/{page.module.url}"
        po = po_file(self.project.locale, language, page.module.name)
        ids = anchoring.Anchors()
        for anchor in page.anchors():
            ids.take(anchor)
        lost = anchoring.lost(ids, self.lock.get(page.module.url, {}))
        trace = next((t for k, t in self.traces.items() if k.partition(":")[0] == page.module.name), None)
        made = asdict(trace) if trace else None
        key = _digest(
            base, language, titles, _bytes(page.module.file), _bytes(po), links.pictures_of(page), lost, made
        )
        old = self.known.get(f"{language}:{page.module.url}", {})
        target = self.stage / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if old.get("key") == key and old.get("digest") == _digest(_bytes(self.out / name)):
            shutil.copyfile(self.out / name, target)
            return {**old, "reused": True}
        catalogue = read_catalogue(po, language) if language != "en" else None
        entry = self._write(language, position, page, links, catalogue, target, lost, trace, titles)
        return {"key": key, "digest": _digest(_bytes(target)), **entry}

    def _write(
        self, language: str, position: int, page: Page, links: Links, catalogue: Catalogue | None,
        target: Path, lost: dict[str, str], trace: Trace | None, titles: dict[str, tuple[str, str]],
    ) -> Entry:  # fmt: skip
        seen: list[tuple[int, str, str]] = []
        context = Context(references=self.project.papers, strict=self.project.has_settings)
        prefix = "../" * (page.module.url.count("/") + (language != "en"))
        around = Surroundings(
            resolve=links.resolver(page),
            address=links.addresser(page, seen, context),
            picture=links.picturer(page, prefix),
            lost=lost,
            trace=trace,
        )
        written = write_page(page, language, catalogue, around, context)
        sheet = Sheet(self.project, self.pages, position, language, written, around.lost, titles)
        target.write_text(page_html(sheet), encoding="utf-8", newline="\n")
        translate = catalogue.translate if catalogue else lambda message: message
        return {
            "ids": sorted({*written.anchors.taken, *around.lost}),
            "links": seen,
            "faults": [(f.path, f.line, f.message, f.is_warning) for f in written.faults],
            "search": list(search_entries(page, translate)),
            "blocks": written.blocks,
            "untranslated": written.untranslated,
        }


def _fingerprint(project: Project, links: Links) -> str:
    here = Path(__file__).parent
    own = [
        file.read_bytes()
        for file in sorted(here.rglob("*"))
        if file.suffix in (".py", ".html", ".css", ".js")
    ]
    libraries = [version(name) for name in ("markdown-it-py", "mdit-py-plugins", "math-core", "pygments")]
    settings = {k: v for k, v in project.settings.items() if k not in ("locale", "lock")}
    papers = {key: (p.href, p.title, p.label) for key, p in project.papers.items()}
    return _digest(*own, libraries, settings, papers, project.title, project.commit, links.fingerprint())


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True, default=str).encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _bytes(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""
