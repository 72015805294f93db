"""Programs, their interpreter, and what of them is to be predicted."""

import itertools

import pytest
import torch

from postil.text.algorithmic import (
    IGNORED,
    NUMBERS,
    VOCABULARY,
    batch_of_programs,
    make_program,
    printed_accuracy,
    run_program,
)


def statements_of(text: str) -> list[tuple[str, ...]]:
    return [tuple(part.split()) for part in text.split(";") if part.strip()]


def test_the_interpreter_follows_a_program() -> None:
    program = "x = 4 ; y = 7 ; x ++ ; if x < 6 : y -- ; print y ; if y > 6 : x ++ ; print x ; x -- ; print x"
    printed = [value for value in run_program(statements_of(program)) if value is not None]
    assert printed == [6, 5, 4]


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("x ++", "x is used before"),
        ("print y", "y is used before"),
        ("x = 10 ; x ++", "outside 1 to 10"),
        ("x = 1 ; x --", "outside 1 to 10"),
        ("x = 11", "outside 1 to 10"),
        ("jump x", "not a statement"),
    ],
)
def test_the_interpreter_refuses(program: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_program(statements_of(program))


def test_printed_values_are_what_running_the_program_prints() -> None:
    for seed in range(50):
        program = make_program(seed, variables=3 + 2 * (seed % 2))
        shown = [int(token) for token, asked in zip(*program, strict=True) if asked]
        bare = " ".join(token for token, asked in zip(*program, strict=True) if not asked)
        statements = statements_of(bare.removesuffix("END"))
        assert len(statements) == 100
        assert [value for value in run_program(statements) if value is not None] == shown
        assert set(program.tokens) <= set(VOCABULARY)


def test_equal_seeds_give_equal_programs() -> None:
    assert make_program(5) == make_program(5)
    assert make_program(5) != make_program(6)
    assert make_program(5, variables=3) != make_program(5, variables=5)


def test_kinds_of_statement_are_drawn_evenly() -> None:
    counts = dict.fromkeys(("=", "++", "--", "if", "print"), 0)
    for seed in range(200):
        bare = [t for t, asked in zip(*make_program(seed), strict=True) if not asked]
        for statement in statements_of(" ".join(bare).removesuffix("END"))[3:]:
            counts[statement[0] if statement[0] in counts else statement[1]] += 1
    # 19,400 draws of five kinds: one standard deviation is 56.
    assert all(abs(count - 3880) < 300 for count in counts.values()), counts


def test_targets_are_the_printed_values_and_nothing_else() -> None:
    inputs, targets = batch_of_programs(range(4), seq_len=700)
    assert inputs.shape == targets.shape == (4, 700)
    for row, seed in enumerate(range(4)):
        program = make_program(seed)
        shown = [token for token, asked in zip(*program, strict=True) if asked]
        asked = targets[row] != IGNORED
        assert [VOCABULARY[i] for i in targets[row][asked].tolist()] == shown
        # The token before a printed value is the variable that is printed, and before it stands print.
        places = asked.nonzero().flatten()
        assert {VOCABULARY[i] for i in inputs[row][places - 1].tolist()} == {"print"}
        assert set(shown) <= set(NUMBERS)
        # A model that copied its next input would be right: the targets are the inputs, one step on.
        assert torch.equal(inputs[row][places + 1], targets[row][places])


def test_a_short_sequence_cuts_a_program() -> None:
    long_inputs, long_targets = batch_of_programs(range(3), seq_len=700)
    inputs, targets = batch_of_programs(range(3), seq_len=50)
    assert torch.equal(inputs, long_inputs[:, :50])
    assert torch.equal(targets, long_targets[:, :50])


def test_accuracy_counts_printed_values_alone() -> None:
    targets = torch.tensor([[IGNORED, 3, IGNORED, 5]])
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 3, 0, 4]]), len(VOCABULARY)).float()
    assert printed_accuracy(logits, targets) == 0.5
    assert printed_accuracy(logits, torch.full_like(targets, IGNORED)).isnan()


def test_impossible_sizes_are_refused() -> None:
    for arguments, complaint in (((0, 100, 6), "variables=6"), ((0, 2, 3), "statements=2")):
        with pytest.raises(ValueError, match=complaint):
            make_program(*arguments)


def test_the_vocabulary_has_no_token_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert all(a != b for a, b in itertools.pairwise(VOCABULARY))
