r"""The publisher: annotated Python, ours or anybody's, as a side-by-side site.

A comment that fills its line and a docstring are notes; everything else is code. The publisher sets them
side by side, in several languages, and needs nothing from a reader's browser but to show a page. It reads
source text and never imports what it documents, unless it is asked to run an example.

A file passes through these modules, each small enough to read in one go:

1. `source` cuts it into rows, `notes` takes the words out of comments and docstrings;
2. `prose`, `mathematics`, `highlight` and `figures` turn Markdown, TeX, code and drawings into HTML;
3. `anchors`, `linking` and `catalogue` know addresses and translations;
4. `reading`, `rows`, `writing` and `sheet` make the page, `furniture` and `searching` what stands around it;
5. `site` builds all of them, `staging` lets the new site take the old one's place in one step;
6. `checking` looks for what a reader would stumble over, `serving` shows the site, `cli` is the command line.
"""
