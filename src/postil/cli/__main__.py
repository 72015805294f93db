r"""`python -m postil.cli`: the same as `postil`."""

import sys

from postil.cli import main

sys.exit(main())
