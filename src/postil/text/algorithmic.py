r"""A made task: run a small program in your head.

A text can often be continued from what stands a few words back. Whether a model can keep *state*, a value
that changes and is referred to long after, needs a task made for it. [fan2020] use random programs over a
few variables with values from 1 to 10:

    x = 4 ; y = 7 ; x ++ ; if x < 6 : y -- ; print y 6 ; print x 5 ; END

Each program has 100 statements, and the model must say what each `print` prints. To know a variable's value
it must follow every change of it, and of the variables its changes depend on, back to where all began. An
ordinary transformer has a fixed number of layers for that, whatever the distance; a model whose memory holds
the results of its own earlier computation can update a value once and go on from there.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["VOCABULARY", "Program", "batch_of_programs", "make_program", "printed_accuracy", "run_program"]

VARIABLES = ("x", "y", "z", "u", "v")
LOWEST, HIGHEST = 1, 10
NUMBERS = tuple(str(value) for value in range(LOWEST, HIGHEST + 1))
VOCABULARY = (";", "=", "++", "--", "if", "<", ">", ":", "print", "END", *VARIABLES, *NUMBERS)
"""Every token there is; a token's number is its place here."""

IGNORED = -100
"""A target of this value is not predicted, as in `torch.nn.functional.cross_entropy`."""

Statement = tuple[str, ...]


class Program(NamedTuple):
    r"""Tokens of a program, and for each whether it is a printed value, the thing to predict."""

    tokens: tuple[str, ...]
    printed: tuple[bool, ...]


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
        case ("if", name, "<" | ">" as relation, number, ":", *rest):
            value = _value(name, values)
            if value < int(number) if relation == "<" else value > int(number):
                return _execute(tuple(rest), values)
        case ("print", name):
            return _value(name, values)
        case _:
            raise ValueError(f"{' '.join(statement)!r} is not a statement")
    return None


def _value(name: str, values: dict[str, int]) -> int:
    if name not in values:
        raise ValueError(f"{name} is used before it has a value")
    return values[name]


def _checked(value: int, statement: Statement) -> int:
    if not LOWEST <= value <= HIGHEST:
        raise ValueError(f"{' '.join(statement)!r} would make {value}, outside {LOWEST} to {HIGHEST}")
    return value


# ## Drawing programs
#
# The kinds of statement are drawn with equal chances. A program starts by giving every variable a value,
# for otherwise most of what could be drawn at first would be meaningless.
def make_program(seed: int, statements: int = 100, variables: int = 3) -> Program:
    r"""Draw a program; equal seeds give equal programs, on every machine.

    Source: [fan2020], Section 4.1. Deviation: the paper does not say how statements that would leave the
    range are avoided; here only those that stay inside it are drawn.

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
    printed: list[bool] = []
    for index in range(statements):
        if index < variables:
            statement: Statement = (names[index], "=", dice.choice(NUMBERS))
        else:
            statement = _draw(dice, names, values)
        shown = _execute(statement, values)
        words = [*statement, *([] if shown is None else [str(shown)]), ";"]
        tokens += words
        printed += [shown is not None and place == len(words) - 2 for place in range(len(words))]
    return Program((*tokens, "END"), (*printed, False))


def _draw(dice: random.Random, names: tuple[str, ...], values: dict[str, int]) -> Statement:
    kind = dice.choice(("assign", "increment", "decrement", "if", "print"))
    name = dice.choice(names)
    if kind == "assign":
        return name, "=", dice.choice(NUMBERS)
    if kind == "print":
        return "print", name
    if kind == "if":
        asked = dice.choice(names), dice.choice("<>"), dice.choice(NUMBERS)
        return "if", *asked, ":", *_change(dice, dice.choice(("++", "--")), names, values)
    return _change(dice, "++" if kind == "increment" else "--", names, values)


def _change(
    dice: random.Random, change: str, names: tuple[str, ...], values: dict[str, int]
) -> tuple[str, str]:
    limit = HIGHEST if change == "++" else LOWEST
    able = [name for name in names if values[name] != limit]
    # Where every variable stands at the limit, only the other direction is left.
    if not able:
        return dice.choice(names), "--" if change == "++" else "++"
    return dice.choice(able), change


# ## Batches
#
# Only printed values are predicted. Everything else in a program is random, and a model that had to predict
# it would spend its capacity on nothing.
def batch_of_programs(
    seeds: range, seq_len: int, statements: int = 100, variables: int = 3
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    r"""Give inputs and targets of one program a row; targets are `IGNORED` but where a value is printed.

    Longer programs are cut at `seq_len` inputs, shorter ones filled up with `END`.
    """
    number = {token: index for index, token in enumerate(VOCABULARY)}
    inputs = torch.full((len(seeds), seq_len), number["END"])
    targets = torch.full((len(seeds), seq_len), IGNORED)
    for row, seed in enumerate(seeds):
        program = make_program(seed, statements, variables)
        ids = torch.tensor([number[token] for token in program.tokens])
        count = min(seq_len, len(ids) - 1)
        inputs[row, :count] = ids[:count]
        asked = torch.tensor(program.printed[1 : count + 1])
        targets[row, :count] = torch.where(asked, ids[1 : count + 1], IGNORED)
    return inputs, targets


def printed_accuracy(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    r"""Give the share of printed values that the most likely token gets right; NaN if none is asked."""
    asked = targets != IGNORED
    return (logits.argmax(-1) == targets)[asked].float().mean()
