r"""Sequence-model papers as pages of running code.

The public names, in the order a reader meets them, are listed in `__init__.pyi` beside this file. Each is
imported when it is first asked for: importing PyTorch takes seconds, and the publisher needs none of it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
