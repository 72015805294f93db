r"""`postil import`: a checkpoint of another project becomes a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from postil.text import Tokenizer, build_tokenizer, load_corpus
from postil.text.characters import Characters

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Read the weights of a checkpoint, never its code, and write a run."""
    parser = argparse.ArgumentParser(
        prog="postil import", description="Turn a checkpoint of another project into a run."
    )
    parser.add_argument("kind", choices=("labml", "nanogpt"), help="whose checkpoint it is")
    parser.add_argument("checkpoint", type=Path, help="the .pt or .pth file")
    parser.add_argument("--out", required=True, type=Path, help="folder of the new run")
    parser.add_argument("--text", help="the text it was trained on: its characters, in order, are the tokens")
    parser.add_argument("--alphabet", type=Path, help="or a JSON list of the tokens, one character each")
    parser.add_argument("--heads", type=int, help="number of heads, where the checkpoint does not say")
    parser.add_argument("--activation", help="labml: of the feed-forward part (default relu)")
    arguments = parser.parse_args(argv)
    tokenizer = _tokenizer(arguments.text, arguments.alphabet)
    if arguments.kind == "labml":
        from postil.integrations.labml import import_labml

        heads, activation = arguments.heads, arguments.activation
        import_labml(arguments.checkpoint, arguments.out, tokenizer, heads=heads, activation=activation)
    else:
        from postil.integrations.nanogpt import import_nanogpt

        if arguments.activation not in (None, "gelu"):
            raise ValueError(f"--activation {arguments.activation}: nanoGPT has gelu only")
        import_nanogpt(arguments.checkpoint, arguments.out, tokenizer, heads=arguments.heads)
    print(f"{arguments.out}: a run; postil sample {arguments.out} continues a prompt")
    return 0


# The projects keep their vocabulary in a pickle of its own, or nowhere. It follows from the text.
def _tokenizer(text: str | None, alphabet: Path | None) -> Tokenizer:
    if (text is None) == (alphabet is None):
        raise ValueError("the checkpoint holds no vocabulary: give --text or --alphabet, one of them")
    if text is not None:
        return build_tokenizer("characters", load_corpus(text))
    assert alphabet is not None
    try:
        tokens = json.loads(alphabet.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{alphabet}: {error}") from None
    if not isinstance(tokens, list) or not all(isinstance(t, str) and len(t) == 1 for t in tokens):
        raise ValueError(f"{alphabet}: expected a JSON list of single characters")
    return Characters("".join(tokens))
