r"""Settings as flags: `--model.d-model 256` for the field `d_model` of `model`.

`train` and `compare` take every field of the same dataclass as a flag, under its own name.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["flat", "shorter", "with_underscores"]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    r"""Write nested settings under the names of their flags; `options` stays a dictionary, one flag."""
    flags = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and name != "options"
        flags |= flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return flags


def shorter(message: str) -> str:
    r"""Say in one line what is wrong with a flag; the parser's own message for a value runs over seven."""
    message = " ".join(message.split())
    match = re.search(r'key "(?P<key>[^"]+)":.*Given value: (?P<value>.*)', message)
    if match is None:
        return message
    kinds = [
        kind
        for kind in dict.fromkeys(re.findall(r"<class '(\w+)'>", message))
        if kind not in ("NoneType", "str")
    ]
    return f"--{match['key']}: {match['value']!r} is not {' or '.join(kinds) or 'possible here'}"


def with_underscores(argv: list[str]) -> list[str]:
    r"""Write `--max-time` as `--max_time`, up to `=`; values and single dashes stay."""
    return [_underscored(argument) if argument.startswith("--") else argument for argument in argv]


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
