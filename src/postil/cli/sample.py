r"""`postil sample`: continue a prompt with a trained model, token by token."""

from __future__ import annotations

import argparse
import sys

from postil.sampling import Sampler, stream
from postil.text import read_text
from postil.training.display import visible
from postil.training.saved import load_run

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Continue a prompt with a trained model, token by token."""
    parser = argparse.ArgumentParser(
        prog="postil sample", description="Continue a prompt with a trained model."
    )
    parser.add_argument("run", help="folder of a run, or of one checkpoint")
    parser.add_argument("--prompt", help="the text to continue; default: that of the training")
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from a file, or - for standard input"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help="how many tokens to write (default 500; 1 for programs, the value they print)",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument(
        "--top-p", type=float, help="draw from the fewest tokens that have probability p together"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same text (default 0)")
    parser.add_argument("--checkpoint", default="auto", help="auto (latest), best, or a checkpoint's name")
    arguments = parser.parse_args(argv)
    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p)
    saved = load_run(arguments.run, arguments.checkpoint)
    prompt = arguments.prompt if arguments.prompt is not None else saved.settings.prompt
    if arguments.prompt_file:
        prompt = read_text(arguments.prompt_file)
    # On a screen control characters are shown, not obeyed; a file gets what the model wrote.
    shown = visible if sys.stdout.isatty() else str
    ids = saved.tokenizer.encode(prompt).tolist()
    # A model of programs has learnt to say what a program prints, and not how it goes on after that.
    usual = 1 if saved.tokenizer.kind == "programs" else 500
    tokens = usual if arguments.tokens is None else arguments.tokens
    words = stream(saved.model, [ids], tokens=tokens, sampler=sampler, seed=arguments.seed)
    text = saved.tokenizer.stream()
    print(shown(prompt), end="", flush=True)
    for _, token in words:
        print(shown(text.feed(token)), end="", flush=True)
    print(shown(text.flush()))
    return 0
