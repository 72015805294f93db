r"""Decoding, measured: one more token after a text, for every model of the registry.

`python benchmarks/decode.py --quick` takes a minute or two, `--full` goes on to longer texts. The yardstick
is our own transformer with its keys and values kept; x-transformers is measured with its own cache where it
is installed. labml-nn has no decoding state: it reads the whole text again for each token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from measure import compare, installed, steady_malloc, write_results
from postil.registry import REGISTRY, ModelSettings, build_language_model

YARDSTICK, VOCABULARY, D, L, H = "multi-head-attention", 65, 256, 4, 8
# Time goes on while it is measured, since a state that is continued twice copies itself; each model has
# positions for so many tokens more.
ROOM = 2000
# A mixer for pictures must know how long a line is.
OPTIONS = {"aft-conv-2d": {"width": 32}}


def stepping(mixer: str, after: int) -> Callable[[], Any]:
    """Read a text; give what writes one more token each time it is called."""
    settings = ModelSettings(
        d_model=D,
        n_layers=L,
        heads=H,
        positions="none",
        seq_len=after + ROOM,
        dropout=0.0,
        options=OPTIONS.get(mixer, {}),
    )
    model = build_language_model(mixer, settings, VOCABULARY).eval()
    ids = torch.randint(VOCABULARY, (1, after))
    with torch.no_grad():
        state = model.prefill(ids)[1]

    def step() -> None:
        nonlocal state
        with torch.no_grad():
            state = model.step(ids[:, 0], state)[1]

    return step


def peer_stepping(after: int) -> Callable[[], Any]:
    """The same for x-transformers, at the same sizes."""
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=after + ROOM,
        attn_layers=Decoder(dim=D, depth=L, heads=H, attn_dim_head=D // H, attn_flash=True),
    ).eval()
    ids = torch.randint(VOCABULARY, (1, after + ROOM))
    now = after
    with torch.no_grad():
        cache = model(ids[:, :now], return_intermediates=True)[1]

    def step() -> None:
        nonlocal now, cache
        now += 1
        with torch.no_grad():
            cache = model(ids[:, :now], cache=cache, return_intermediates=True)[1]

    return step


def speed(lengths: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    for after in lengths:
        # AFT-full has a bias for every pair of positions, which no long text has room for.
        mixers = [name for name in REGISTRY if name != "aft-full" or after <= 1000]
        runs = {name: stepping(name, after) for name in mixers}
        if installed("x_transformers"):
            runs["x-transformers, cached"] = peer_stepping(after)
        times = compare(runs, rounds=rounds)
        over = {name: v["ratio"][YARDSTICK]["median"] for name, v in times.items() if name != YARDSTICK}
        print(f"one token after {after}, over attention's time: {over}", flush=True)
        row = {"what": "decoding one token", "after": after, "B": 1, "D": D, "L": L, "H": H, "threads": 1}
        yield row | {"rounds": rounds, "over_attention": over, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two lengths, few rounds (the default)")
    parser.add_argument("--full", action="store_true", help="texts of up to 4,000 tokens, 9 rounds")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steady_malloc()
    rows = list(speed([16, 250, 1000, 4000], 9) if chosen.full else speed([16, 250], 5))
    name = "decode" if chosen.full else "decode-quick"
    print(write_results(name, rows, ("x-transformers",)))


if __name__ == "__main__":
    main()
