r"""How many inputs a test tries."""

import os

MORE = int(os.environ.get("POSTIL_FUZZ", "1"))


def many(count: int) -> int:
    return count * MORE
