r"""`postil data`: what a text is as tokens."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from postil.text import build_tokenizer, default_corpus, encode_corpus, load_corpus, split
from postil.text.entropy import unigram_bits

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Show what a text is as tokens."""
    parser = argparse.ArgumentParser(prog="postil data", description="Look at a text as tokens.")
    parser.add_argument(
        "text", nargs="?", help="a corpus by name, a file, a folder, or - (default: as train)"
    )
    parser.add_argument("--tokenizer", default="characters", help="characters, bytes, words or bpe")
    parser.add_argument("--vocab-size", type=int, help="for bpe and words")
    arguments = parser.parse_args(argv)
    corpus = load_corpus(arguments.text) if arguments.text else default_corpus()
    tokenizer = build_tokenizer(arguments.tokenizer, corpus, vocab_size=arguments.vocab_size)
    tokens = encode_corpus(corpus, tokenizer)
    training, validation = split(tokens)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("text", f"{corpus.name}, {corpus.origin}"),
        ("size", f"{corpus.size:,} bytes"),
        ("SHA-256", corpus.sha256),
        ("tokens", f"{len(tokens):,}: {len(training):,} for training, {len(validation):,} for validation"),
        ("vocabulary", f"{tokenizer.vocab_size:,} {tokenizer.kind}"),
        ("unigram entropy", f"{unigram_bits(training, validation, tokenizer.vocab_size):.3f} bits a token"),
        ("kept in", str(tokens.file.path)),
    ):
        table.add_row(f"[bold]{name}[/]", value)
    if corpus.note:
        print(corpus.note, file=sys.stderr)
    Console(highlight=False).print(table)
    return 0
