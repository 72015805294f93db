r"""A made task: run a small program in your head.

A text can often be continued from what stands a few words back. Whether a model can keep *state*, a value
that changes and is referred to long after, needs a task made for it. [fan2020] use random programs over a
few variables with values from 1 to 10:

    x = 4 ; y = 7 ; x ++ ; if x < 6 : y -- ; print y ; x ++ ; print x ; END

The model reads a program, and after each `print x` it must say the value: here 6 and then again 6. What it
says is never shown to it, and no variable is assigned twice. So it must follow every change of a variable,
and of the variables its changes depend on, back to where all began. An ordinary transformer has a fixed
number of layers for that, whatever the distance; a model whose memory holds the results of its own earlier
computation can update a value once and go on from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from postil.text.reading import TextError
from postil.text.tokenizer import FORMAT, Ids, TextStream, Tokenizer, Units, checked_ids, sum_units

__all__ = ["VOCABULARY", "Program", "ProgramTokens", "batch_of_programs", "make_program", "run_program"]

VARIABLES = ("x", "y", "z", "u", "v")
LOWEST, HIGHEST = 1, 10
NUMBERS = tuple(str(value) for value in range(LOWEST, HIGHEST + 1))
VOCABULARY = (";", "=", "++", "--", "if", "<", ">", ":", "print", "END", *VARIABLES, *NUMBERS)
"""Every token there is; a token's number is its place here."""

NUMBER_OF = {token: number for number, token in enumerate(VOCABULARY)}

IGNORED = -100
"""A target of this value is not predicted, as in `torch.nn.functional.cross_entropy`."""

Statement = tuple[str, ...]


class Program(NamedTuple):
    r"""Tokens of a program, and for each the value to be said once it is read, `None` almost everywhere."""

    tokens: tuple[str, ...]
    answers: tuple[int | None, ...]


# ## The language
#
# Values stay between 1 and 10. A statement that would leave the range is never drawn, so nothing overflows
# and no rule for it has to be learned. That holds for the change inside a condition too, true or false.
def run_program(statements: list[Statement]) -> list[int | None]:
    r"""Execute statements; give for each the value it prints, `None` where it prints nothing.

    Raises:
        ValueError: a statement is not of the language, a variable has no value yet, or leaves the range.
    """
    values: dict[str, int] = {}
    return [_execute(statement, values) for statement in statements]


def _execute(statement: Statement, values: dict[str, int]) -> int | None:
    match statement:
        case (name, "=", number):
            values[name] = _checked(int(number), statement)
        case (name, "++" | "--" as change):
            values[name] = _checked(_value(name, values) + (1 if change == "++" else -1), statement)
        case ("if", name, "<" | ">" as relation, other, ":", *rest):
            left, right = _value(name, values), _value(other, values)
            if left < right if relation == "<" else left > right:
                return _execute(tuple(rest), values)
        case ("print", name):
            return _value(name, values)
        case _:
            raise ValueError(f"{' '.join(statement)!r} is not a statement")
    return None


def _value(name: str, values: dict[str, int]) -> int:
    if name in NUMBERS:
        return int(name)
    if name not in values:
        raise ValueError(f"{name} is used before it has a value")
    return values[name]


def _checked(value: int, statement: Statement) -> int:
    if not LOWEST <= value <= HIGHEST:
        raise ValueError(f"{' '.join(statement)!r} would make {value}, outside {LOWEST} to {HIGHEST}")
    return value


# ## Drawing programs
#
# A value that is assigned anew makes all before it idle, and a model need look back no further than that. So
# each variable is assigned once, at the beginning, and from then on only changed, by one up or down.
def make_program(seed: int, statements: int = 100, variables: int = 3) -> Program:
    r"""Draw a program; equal seeds give equal programs, on every machine.

    Source: [fan2020], Section 4.1. Deviation: all variables are assigned before anything else happens; the
    authors' generator draws an assignment like any other statement while a variable has none.

    Raises:
        ValueError: the number of variables or statements is not possible.
    """
    if not 1 <= variables <= len(VARIABLES):
        raise ValueError(f"variables={variables}: there are names for 1 to {len(VARIABLES)}")
    if statements < variables:
        raise ValueError(f"statements={statements}: each of {variables} variables is first given a value")
    dice = random.Random(f"algorithmic {variables} {statements} {seed}")
    names, values = VARIABLES[:variables], {}
    tokens: list[str] = []
    answers: list[int | None] = []
    for index in range(statements):
        statement = (
            (names[index], "=", dice.choice(NUMBERS)) if index < variables else _draw(dice, names, values)
        )
        # The value is due as soon as it is known what is printed, at the last word before the semicolon.
        answers += [None] * (len(statement) - 1) + [_execute(statement, values), None]
        tokens += [*statement, ";"]
    return Program((*tokens, "END"), (*answers, None))


# The kinds are drawn with equal chances, and what would leave the range is drawn again, whole. Changes and
# conditions are therefore a little rarer than `print`, by the share of values that stand at a limit.
def _draw(dice: random.Random, names: tuple[str, ...], values: dict[str, int]) -> Statement:
    while True:
        kind, name = dice.choice(("++", "--", "if", "print")), dice.choice(names)
        if kind == "print":
            return "print", name
        change = kind if kind != "if" else dice.choice(("++", "--"))
        if values[name] == (HIGHEST if change == "++" else LOWEST):
            continue
        return (name, change) if kind != "if" else (*_condition(dice, names), name, change)


def _condition(dice: random.Random, names: tuple[str, ...]) -> Statement:
    asked = dice.choice(names)
    others = tuple(name for name in names if name != asked)
    # A comparison with a number that was read long ago is harder than one with a number that stands there.
    other = dice.choice(others) if others and dice.random() < 0.5 else dice.choice(NUMBERS)
    return "if", asked, dice.choice("<>"), other, ":"


# ## Batches
#
# Only printed values are predicted. Everything else in a program is random, and a model that had to predict
# it would spend its capacity on nothing.
def batch_of_programs(
    seeds: Iterable[int], seq_len: int, statements: int = 100, variables: int = 3
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    r"""Give inputs and targets of one program a row; targets are `IGNORED` but where a value is due.

    Longer programs are cut at `seq_len` tokens, shorter ones filled up with `END`.
    """
    programs = [make_program(seed, statements, variables) for seed in seeds]
    inputs = torch.full((len(programs), seq_len), NUMBER_OF["END"])
    targets = torch.full((len(programs), seq_len), IGNORED)
    for row, (tokens, answers) in enumerate(programs):
        ids = torch.tensor([NUMBER_OF[token] for token in tokens[:seq_len]])
        inputs[row, : len(ids)] = ids
        due = [IGNORED if answer is None else NUMBER_OF[str(answer)] for answer in answers[:seq_len]]
        targets[row, : len(due)] = torch.tensor(due)
    return inputs, targets


# ## Programs as text
class ProgramTokens(Tokenizer):
    r"""One token for each word of `VOCABULARY`, with blanks between them."""

    kind = "programs"
    vocab_size = len(VOCABULARY)

    def encode_stream(self, chunks: Iterable[str]) -> Iterator[Ids]:
        r"""Encode a program, or the beginning of one."""
        words = "".join(chunks).split()
        for position, word in enumerate(words):
            if word not in NUMBER_OF:
                raise TextError(
                    f"{word!r} at position {position} (words counted from 0) is not a word of the programs; "
                    f"these are, with blanks between them: {' '.join(VOCABULARY)}"
                )
        yield np.array([NUMBER_OF[word] for word in words], np.uint8)

    def decode(self, ids: Iterable[int] | Ids) -> str:
        r"""Join the words with blanks, one before the first: what is decoded follows something."""
        return "".join(" " + VOCABULARY[i] for i in checked_ids(ids, self.vocab_size))

    def stream(self) -> TextStream:
        r"""Start a text that is decoded one word at a time."""
        return _ProgramStream(self)

    def symbol(self, token: int) -> str:
        r"""Return the word."""
        return VOCABULARY[checked_ids([token], self.vocab_size)[0]]

    def measure(self, chunks: Iterable[Ids]) -> Units:
        r"""Count tokens, and characters with a blank before each word."""
        sizes = np.array([1 + len(word) for word in VOCABULARY])
        return sum_units(chunks, sizes, sizes)

    def to_dict(self) -> dict[str, Any]:
        r"""Return the words in the order of their numbers."""
        return {"format": FORMAT, "kind": self.kind, "words": list(VOCABULARY)}


class _ProgramStream(TextStream):
    def __init__(self, tokenizer: ProgramTokens):
        self._tokenizer = tokenizer

    def feed(self, token: int) -> str:
        return self._tokenizer.decode([token])
