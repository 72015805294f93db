r"""`postil show`: pictures of what a model learnt, for a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from postil import durable
from postil.showing import as_page, draw, pictures
from postil.text import read_text
from postil.training.display import visible
from postil.training.saved import load_run

__all__ = ["run"]

LONGEST = 128
PROMPT = "It is the east, and Juliet is the sun.\nArise, fair sun, and kill the envious moon"


def run(argv: list[str]) -> int:
    r"""Draw what a trained model reads at each position of a text."""
    parser = argparse.ArgumentParser(
        prog="postil show", description="Pictures of what a model learnt: weights, biases, memories."
    )
    parser.add_argument("run", help="folder of a run, or of one checkpoint")
    parser.add_argument("--prompt", help="the text to look at; default: two lines of Romeo and Juliet")
    parser.add_argument("--prompt-file", metavar="FILE", help="read it from a file, or - for standard input")
    parser.add_argument("--out", help="folder of the pictures; default: pictures/ in the run's folder")
    parser.add_argument("--checkpoint", default="auto", help="auto (latest), best, or a checkpoint's name")
    arguments = parser.parse_args(argv)
    saved = load_run(arguments.run, arguments.checkpoint)
    text = PROMPT if arguments.prompt is None else arguments.prompt
    if arguments.prompt_file:
        text = read_text(arguments.prompt_file)
    ids = saved.tokenizer.encode(text).tolist()
    longest = LONGEST if saved.model.max_len is None else min(LONGEST, saved.model.max_len)
    if len(ids) > longest:
        print(f"the text has {len(ids)} tokens; the first {longest} are shown", file=sys.stderr)
    ids = ids[:longest]
    tokens = [visible(saved.tokenizer.decode([token])) for token in ids]
    found = pictures(saved.model, torch.tensor(ids))
    out = Path(arguments.out) if arguments.out else Path(arguments.run) / "pictures"
    durable.make_directory(out)
    title = f"What {saved.settings.mixer} reads"
    durable.replace_file(out / "index.html", as_page(found, tokens, title).encode())
    try:
        draw(found, tokens, out)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
    print(f"{len(found)} pictures of {len(tokens)} tokens; open {out / 'index.html'}")
    return 0
