r"""Configuration files: data, in exactly one reading.

YAML can do more than a configuration needs, and each extra has been used against somebody: tags that build
objects, and aliases that turn a kilobyte into a gigabyte. And it takes the last of two equal keys without
a word, so that the setting a person reads is not the one that trains. None of this passes here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from postil import durable

__all__ = ["read_configuration"]

_LIMIT = 2**20
_DEPTH = 20


def read_configuration(path: Path) -> str:
    r"""Return a YAML, JSON or TOML file as YAML text that holds plain data only.

    Raises:
        ValueError: it cannot be read, or holds anything else; file, line and remedy are named.
    """
    try:
        text = durable.read_file(path.resolve(), limit=_LIMIT).decode("utf-8")
        if path.suffix == ".toml":
            return json.dumps(_toml(text))
        _refuse_tricks(text)
    except OSError as error:
        raise ValueError(f"{path}: {durable.one_line(error)}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {durable.one_line(error)}") from None
    return text


# Equal keys are an error in TOML itself.
def _toml(text: str) -> object:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    return tomllib.loads(text)


# The events of the parser come before anything is built from them, so a trick is found at no cost, whatever
# it would have grown into. Each open mapping remembers the keys it has had; a sequence is a `None`.
def _refuse_tricks(text: str) -> None:
    open_nodes: list[set[str] | None] = []
    expects_key: list[bool] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"line {line}: anchors and aliases (& and *) are not read; write the value out")
        if getattr(event, "tag", None):
            raise ValueError(f"line {line}: the tag {event.tag!r} is not read; write plain values")
        if isinstance(event, yaml.CollectionEndEvent):
            open_nodes.pop()
            expects_key.pop()
        elif isinstance(event, yaml.NodeEvent):
            _see(event, line, open_nodes, expects_key)


def _see(
    event: yaml.NodeEvent, line: int, open_nodes: list[set[str] | None], expects_key: list[bool]
) -> None:
    keys = open_nodes[-1] if open_nodes else None
    if keys is not None:
        if expects_key[-1]:
            if not isinstance(event, yaml.ScalarEvent):
                raise ValueError(f"line {line}: a key must be a plain name")
            if event.value in keys:
                raise ValueError(f"line {line}: {event.value!r} is set twice; keep one")
            keys.add(event.value)
        expects_key[-1] = not expects_key[-1]
    if isinstance(event, yaml.CollectionStartEvent):
        if len(open_nodes) == _DEPTH:
            raise ValueError(f"line {line}: nested more than {_DEPTH} deep")
        open_nodes.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
        expects_key.append(True)
