r"""Input that is changed until it reaches new code, for minutes instead of by the hundred.

    pip install atheris
    python tests/fuzz/guided.py "tensor files" 60

tries one reader for 60 seconds of processor time and writes what came of it into
`docs/reliability/fuzz.json`. If the reader fails in any other way than by the one error it promises, this
ends with an error and shows the input.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

RECORD = Path(__file__).parents[2] / "docs/reliability/fuzz.json"


# Seeds are what honest writers make: from nothing, a fuzzer would need days to a first valid header.
def seeds(reader: str, folder: Path) -> None:
    import numpy as np
    import torch

    from postil.text.token_files import write_tokens
    from postil.training import checkpoints

    folder.mkdir()
    tensors = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}}
    saved = checkpoints.save(folder.parent / "saved", 1, tensors, {"settings": {"x": [1, "y"]}})
    if reader == "tensor files":
        shutil.copy(saved / "model.safetensors", folder)
    elif reader == "manifests":
        shutil.copy(saved / "manifest.json", folder)
    elif reader == "token files":
        pair = folder.parent / "good.bin"
        write_tokens(pair, [np.arange(200, dtype=np.int64) % 7], vocab_size=7, corpus="c", tokenizer="t")
        (folder / "one").write_bytes(pair.with_suffix(".json").read_bytes() + b"\0\0" + pair.read_bytes())
    elif reader == "configurations":
        (folder / "one").write_text("updates: 3\nmodel: {d_model: 16}\nlist: [a, 'b']\n")
    else:
        for path in sorted((Path(__file__).parents[2] / "src/postil/mixers").rglob("*.py"))[:6]:
            (folder / path.name).write_bytes(path.read_bytes()[:4000])


# ## The readers: each takes bytes, and lets through only what it does not promise
def tensor_files(folder: Path) -> Callable[[bytes], None]:
    from postil.training import checkpoints, manifest

    saved = next((folder / "saved").iterdir())
    content = json.loads((saved / "manifest.json").read_text())
    content.pop("sha256")

    def read(data: bytes) -> None:
        (saved / "model.safetensors").write_bytes(data)
        size, digest = checkpoints.tensor_files.size_and_digest(saved / "model.safetensors")
        content["files"]["model.safetensors"] = {"size": size, "sha256": digest}
        (saved / "manifest.json").write_bytes(manifest._sealed(content))
        try:
            checkpoints.load(saved)
        except checkpoints.CheckpointError as error:
            assert "\n" not in str(error)

    return read


def manifests(folder: Path) -> Callable[[bytes], None]:
    from postil.training import checkpoints, manifest

    saved = next((folder / "saved").iterdir())

    def read(data: bytes) -> None:
        try:
            content = json.loads(data)
            content.pop("sha256", None)
            data = manifest._sealed(content)
        except (ValueError, AttributeError, TypeError, RecursionError):
            pass
        (saved / "manifest.json").write_bytes(data)
        try:
            checkpoints.load(saved)
        except checkpoints.CheckpointError as error:
            assert "\n" not in str(error)

    return read


def token_files(folder: Path) -> Callable[[bytes], None]:
    from postil.text.reading import TextError
    from postil.text.token_files import open_tokens

    path = folder / "tokens.bin"

    def read(data: bytes) -> None:
        described, _, tokens = data.partition(b"\0\0")
        path.with_suffix(".json").write_bytes(described)
        path.write_bytes(tokens)
        try:
            found = open_tokens(path)
            found.rows([0], len(found))
        except TextError as error:
            assert "\n" not in str(error)

    return read


def configurations(folder: Path) -> Callable[[bytes], None]:
    from postil.cli.configuration import read_configuration

    path = folder / "config.yaml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read_configuration(path)
        except ValueError as error:
            assert "\n" not in str(error)

    return read


def page_splitter(folder: Path) -> Callable[[bytes], None]:
    from postil.pages.source import SourceError, parse, split

    def read(data: bytes) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = parse(data.decode("utf-8", "replace"))
        except SourceError as error:
            assert "\n" not in str(error)
            return
        numbers = [n for row in split(source) for part in row.parts for n in range(part.first, part.last + 1)]
        assert numbers == list(range(1, len(source.lines) + 1))

    return read


READERS = {
    "tensor files": tensor_files,
    "manifests": manifests,
    "token files": token_files,
    "configurations": configurations,
    "page splitter": page_splitter,
}


# ## Two processes: libFuzzer ends the one it runs in
def fuzz(reader: str, seconds: int, folder: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["postil"]):
        read = READERS[reader](folder)
    tried = 0

    def once(data: bytes) -> None:
        nonlocal tried
        read(data)
        tried += 1

    def leave(*_: object) -> None:
        os.write(2, f"\ntried {tried}\n".encode())
        os._exit(0)

    flags = ["-max_len=8192", "-rss_limit_mb=3000", "-timeout=300"]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={folder}/", str(folder / "seeds")], once)
    signal.signal(signal.SIGXCPU, leave)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, resource.RLIM_INFINITY))
    atheris.Fuzz()


def main() -> int:
    reader, seconds = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        fuzz(reader, seconds, Path(sys.argv[3]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seeds(reader, folder / "seeds")
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:3], name], stderr=subprocess.PIPE, text=True
        )
        inputs = [int(n) for n in re.findall(r"^tried (\d+)", done.stderr, re.MULTILINE)]
        reached = [int(n) for n in re.findall(r"cov: (\d+)", done.stderr)]
        result = {
            "seconds": seconds,
            "inputs": inputs[-1] if inputs else 0,
            "reached": reached[-1] if reached else 0,
            "faults": int(done.returncode != 0),
        }
        print(reader, result)
        if done.returncode:
            print(done.stderr[-3000:])
            for path in folder.glob("crash-*"):
                print(path.read_bytes()[:2000])
            return 1
    counts = json.loads(RECORD.read_text())
    counts.setdefault("guided", {})[reader] = result
    RECORD.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
