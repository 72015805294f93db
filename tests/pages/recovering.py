"""Takes a page apart again, as a reader's browser would hold it."""

from __future__ import annotations

from html.parser import HTMLParser


class _Code(HTMLParser):
    """Collects the text of every `pre` inside a row's code, and the lines each row says it has."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.spans: list[tuple[int, int]] = []
        self.pieces: list[str] = []
        self.numbers: list[int] = []
        self._in_code = 0
        self._in_pre = False

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "div":
            if "data-lines" in values:
                first, last = values["data-lines"].split("-")
                self.spans.append((int(first), int(last)))
            self._in_code += self._in_code > 0 or values.get("class") == "code"
        if tag == "pre" and self._in_code:
            self._in_pre = True
            self.pieces.append("")
            self.numbers += [int(n) for n in values["data-n"].split("\n")]

    def handle_endtag(self, tag):
        if tag == "div" and self._in_code:
            self._in_code -= 1
        if tag == "pre":
            self._in_pre = False

    def handle_data(self, data):
        if self._in_pre:
            self.pieces[-1] += data


def taken_apart(page: str) -> tuple[list[tuple[int, int]], list[int], str]:
    """The rows' line spans, the line numbers shown, and the code as it would be copied row by row."""
    parser = _Code()
    parser.feed(page)
    parser.close()
    # A browser drops one line end right after <pre>.
    code = "\n".join(piece.removeprefix("\n") for piece in parser.pieces)
    return parser.spans, parser.numbers, code + "\n"
