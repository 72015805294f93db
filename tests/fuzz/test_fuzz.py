r"""Each reader gives back what it should or one clear error, whatever it is given."""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from amounts import many
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postil.cli.configuration import read_configuration
from postil.pages.source import SourceError, parse, split
from postil.text import build_tokenizer, load_corpus
from postil.text.reading import TextError
from postil.text.token_files import open_tokens, write_tokens
from postil.training import checkpoints, manifest
from postil.training.checkpoints import CheckpointError

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
FILES = ["model.safetensors", "metadata.json", "manifest.json"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}}
    return checkpoints.save(tmp_path / "run", 1, tensors, {"settings": {"x": [1, "y"]}})


# Cut, filled, doubled, overwritten: what disks, copies and people do to files.
@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 64)))
    return data[:start] + draw(st.binary(max_size=64)) + data[end:]


def one_line(error: Exception) -> None:
    assert "\n" not in str(error) and len(str(error)) < 5000


def test_damaged_checkpoints(saved: Path, tally) -> None:
    original = {name: (saved / name).read_bytes() for name in FILES}

    @settings(max_examples=many(150), **COMMON)
    @given(st.data(), st.sampled_from(FILES))
    def attack(data: st.DataObject, name: str) -> None:
        changed = data.draw(damaged(original[name]))
        (saved / name).write_bytes(changed)
        try:
            checkpoints.load(saved)
            assert changed == original[name], "damage went unseen"
            tally.add("unchanged")
        except CheckpointError as error:
            one_line(error)
            tally.add("refused")
        finally:
            (saved / name).write_bytes(original[name])

    attack()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


# The attacker knows the format and seals what he writes, so only the reader's own checks stand in his way.
def test_sealed_manifests_of_strangers(saved: Path, tally) -> None:
    content = json.loads((saved / manifest.MANIFEST).read_text())
    content.pop("sha256")

    @settings(max_examples=many(150), **COMMON)
    @given(st.dictionaries(st.sampled_from(sorted(content)), JSON, min_size=1))
    def attack(changes: dict) -> None:
        (saved / manifest.MANIFEST).write_bytes(manifest._sealed({**content, **changes}))
        try:
            checkpoints.load(saved)
            tally.add("read")
        except CheckpointError as error:
            one_line(error)
            tally.add("refused")

    attack()


def test_sealed_tensor_files_of_strangers(saved: Path, tally) -> None:
    file = saved / "model.safetensors"
    original, content = file.read_bytes(), json.loads((saved / manifest.MANIFEST).read_text())
    content.pop("sha256")

    @settings(max_examples=many(150), **COMMON)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        file.write_bytes(data.draw(damaged(original) | st.binary(max_size=200)))
        size, digest = checkpoints.tensor_files.size_and_digest(file)
        content["files"][file.name] = {"size": size, "sha256": digest}
        (saved / manifest.MANIFEST).write_bytes(manifest._sealed(content))
        try:
            checkpoints.load(saved)
            tally.add("read")
        except CheckpointError as error:
            one_line(error)
            tally.add("refused")

    attack()


def size(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(size(key) + size(each) for key, each in value.items())
    return 1 + sum(map(size, value)) if isinstance(value, list) else 1


def test_configurations(tmp_path: Path, tally) -> None:
    file = tmp_path / "config.yaml"
    words = st.sampled_from(
        [
            "updates",
            "model",
            "lr",
            ": ",
            "\n",
            "  ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            ",",
            "&a ",
            "*a",
            "!!python/object:os.system ",
            "<<",
            "'",
            '"',
            "|",
            "1e-3",
            "#",
            "?",
            "---",
            "\t",
        ]
    )

    @settings(max_examples=many(300), **COMMON)
    @given(st.lists(words, max_size=30).map("".join) | st.text(max_size=80) | JSON.map(json.dumps))
    def attack(text: str) -> None:
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read = read_configuration(file)
        except ValueError as error:
            one_line(error)
            tally.add("refused")
            return
        # As plain data it is no larger than the text that says it, and no key of it was lost.
        assert size(next(iter(yaml.load_all(read, Loader=yaml.BaseLoader)), None)) <= 4 * len(read) + 4
        tally.add("read")

    attack()


def test_token_files(tmp_path: Path, tally) -> None:
    good = tmp_path / "good.bin"
    chunks = [np.arange(200, dtype=np.int64) % 7]
    write_tokens(good, chunks, vocab_size=7, corpus="c", tokenizer="t")
    pair = {suffix: good.with_suffix(suffix).read_bytes() for suffix in (".bin", ".json")}

    @settings(max_examples=many(150), **COMMON)
    @given(st.data(), st.sampled_from(sorted(pair)))
    def attack(data: st.DataObject, suffix: str) -> None:
        changed = data.draw(damaged(pair[suffix]))
        good.with_suffix(suffix).write_bytes(changed)
        try:
            tokens = open_tokens(good, corpus="c", tokenizer="t")
            assert tokens.rows([0], len(tokens)).tolist() == [(np.arange(200) % 7).tolist()]
            tally.add("unchanged in meaning")
        except TextError as error:
            one_line(error)
            tally.add("refused")
        finally:
            good.with_suffix(suffix).write_bytes(pair[suffix])

    attack()


def test_corpora(tmp_path: Path, tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTIL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "text.txt"

    @settings(max_examples=many(200), **COMMON)
    @given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
    def attack(data: bytes) -> None:
        file.write_bytes(data)
        try:
            corpus = load_corpus(str(file))
            tokenizer = build_tokenizer("characters", corpus)
            text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
            tally.add("read")
        except TextError as error:
            one_line(error)
            tally.add("refused")

    attack()


def test_the_page_splitter(tally) -> None:
    pieces = st.sampled_from(
        [
            "def f():\n",
            "class A:\n",
            "    ",
            "x = 1",
            "\n",
            "# note\n",
            '"""',
            "'''",
            "r",
            "f",
            "(",
            ")",
            "[",
            "]",
            ";",
            "\\\n",
            "@a\n",
            "\f",
            "\t",
            "\r\n",
            "\u2028",
            "#",
            "pass\n",
            "async ",
            "return x\n",
            '"text"\n',
            "if x:\n",
            "é",
            "\x85",
            ": int = 2\n",
        ]
    )

    @settings(max_examples=many(400), **COMMON)
    @given(st.lists(pieces, max_size=25).map("".join))
    def attack(text: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = parse(text)
        except SourceError as error:
            one_line(error)
            with (
                warnings.catch_warnings(),
                pytest.raises((SyntaxError, ValueError, RecursionError, MemoryError)),
            ):
                warnings.simplefilter("ignore")
                ast.parse(text)
            tally.add("refused, as Python does")
            return
        numbers = [n for row in split(source) for part in row.parts for n in range(part.first, part.last + 1)]
        assert numbers == list(range(1, len(source.lines) + 1))
        tally.add("split")

    attack()
