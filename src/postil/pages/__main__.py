r"""Entry: `python -m postil.pages`."""

from postil.pages.cli import main

raise SystemExit(main())
