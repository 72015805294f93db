"""Programs, their interpreter, what of them is to be predicted, and how they are written as text."""

import itertools

import pytest
import torch

from postil.text import TextError, tokenizer_from_dict
from postil.text.algorithmic import (
    IGNORED,
    NUMBERS,
    VOCABULARY,
    ProgramTokens,
    batch_of_programs,
    make_program,
    run_program,
)


def statements_of(text: str) -> list[tuple[str, ...]]:
    return [tuple(part.split()) for part in text.split(";") if part.strip()]


def drawn(seed: int, **sizes: int) -> list[tuple[str, ...]]:
    return statements_of(" ".join(make_program(seed, **sizes).tokens).removesuffix("END"))


def test_the_interpreter_follows_a_program() -> None:
    program = "x = 4 ; y = 7 ; x ++ ; if x < 6 : y -- ; print y ; if y > x : x ++ ; print x ; if y < 6 : x --"
    printed = [value for value in run_program(statements_of(program)) if value is not None]
    assert printed == [6, 6]


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("x ++", "x is used before"),
        ("print y", "y is used before"),
        ("x = 3 ; if x < y : x ++", "y is used before"),
        ("x = 10 ; x ++", "outside 1 to 10"),
        ("x = 1 ; x --", "outside 1 to 10"),
        ("x = 11", "outside 1 to 10"),
        ("jump x", "not a statement"),
    ],
)
def test_the_interpreter_refuses(program: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run_program(statements_of(program))


def test_answers_are_what_running_the_program_prints() -> None:
    for seed in range(50):
        variables = 3 + 2 * (seed % 2)
        program = make_program(seed, variables=variables)
        statements = drawn(seed, variables=variables)
        assert len(statements) == 100
        said = [answer for answer in program.answers if answer is not None]
        assert said == [value for value in run_program(statements) if value is not None]
        assert set(program.tokens) <= set(VOCABULARY)


def test_an_answer_is_due_when_the_print_is_read_and_is_never_shown() -> None:
    for seed in range(20):
        tokens, answers = make_program(seed)
        assert len(tokens) == len(answers)
        for place, answer in enumerate(answers):
            assert (answer is not None) == (place > 0 and tokens[place - 1] == "print")
            assert answer is None or tokens[place + 1] == ";"


def test_variables_are_assigned_once_at_the_beginning() -> None:
    for seed in range(50):
        statements = drawn(seed, variables=5)
        assert [statement[:2] for statement in statements[:5]] == [(name, "=") for name in "xyzuv"]
        assert not any("=" in statement for statement in statements[5:])


# A false condition must not hide a change that could not be made.
def test_changes_inside_conditions_stay_in_range_whether_made_or_not() -> None:
    for seed in range(100):
        statements = drawn(seed)
        for place, statement in enumerate(statements):
            if statement[0] == "if":
                run_program([*statements[:place], statement[5:]])


def test_equal_seeds_give_equal_programs() -> None:
    assert make_program(5) == make_program(5)
    assert make_program(5) != make_program(6) != make_program(-6)
    assert make_program(5, variables=3) != make_program(5, variables=5)


# At the limits 1 and 10 a change is drawn again, so `print` is somewhat more frequent than the three others.
def test_kinds_of_statement_are_drawn_nearly_evenly() -> None:
    counts = dict.fromkeys(("++", "--", "if", "print"), 0)
    for seed in range(200):
        for statement in drawn(seed)[3:]:
            counts[statement[0] if statement[0] in counts else statement[1]] += 1
    shares = {kind: count / sum(counts.values()) for kind, count in counts.items()}
    assert all(0.22 < shares[kind] < 0.25 for kind in ("++", "--", "if")), shares
    assert 0.25 < shares["print"] < 0.32, shares


def test_targets_are_the_answers_and_nothing_else() -> None:
    inputs, targets = batch_of_programs(range(4), seq_len=700)
    assert inputs.shape == targets.shape == (4, 700)
    for row, seed in enumerate(range(4)):
        program = make_program(seed)
        asked = targets[row] != IGNORED
        said = [str(answer) for answer in program.answers if answer is not None]
        assert [VOCABULARY[i] for i in targets[row][asked].tolist()] == said
        count = len(program.tokens)
        assert tuple(VOCABULARY[i] for i in inputs[row, :count].tolist()) == program.tokens
        assert {VOCABULARY[i] for i in inputs[row, count:].tolist()} == {"END"}


def test_a_short_sequence_cuts_a_program() -> None:
    long_inputs, long_targets = batch_of_programs(range(3), seq_len=700)
    inputs, targets = batch_of_programs(range(3), seq_len=50)
    assert torch.equal(inputs, long_inputs[:, :50])
    assert torch.equal(targets, long_targets[:, :50])


def test_impossible_sizes_are_refused() -> None:
    for arguments, complaint in (((0, 100, 6), "variables=6"), ((0, 2, 3), "statements=2")):
        with pytest.raises(ValueError, match=complaint):
            make_program(*arguments)


def test_one_variable_is_compared_with_numbers_only() -> None:
    conditions = [s for seed in range(20) for s in drawn(seed, variables=1) if s[0] == "if"]
    assert conditions and all(s[3] in NUMBERS for s in conditions)


def test_the_vocabulary_has_no_token_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert all(a != b for a, b in itertools.pairwise(VOCABULARY))


# ## Programs as text
def test_programs_are_encoded_and_decoded_word_by_word() -> None:
    tokenizer = ProgramTokens()
    text = " ".join(make_program(1).tokens)
    ids = tokenizer.encode(text)
    assert [tokenizer.symbol(i) for i in ids.tolist()] == text.split()
    assert tokenizer.decode(ids) == " " + text
    stream = tokenizer.stream()
    assert "".join(stream.feed(i) for i in ids.tolist()) + stream.flush() == " " + text
    assert tokenizer.measure([ids]).characters == len(text) + 1


def test_chunks_may_be_cut_anywhere() -> None:
    tokenizer, text = ProgramTokens(), "x = 10 ; print x ;"
    for cut in range(len(text)):
        (ids,) = tokenizer.encode_stream([text[:cut], text[cut:]])
        assert ids.tolist() == tokenizer.encode(text).tolist()


def test_a_word_that_is_none_of_theirs_is_named() -> None:
    with pytest.raises(TextError, match="'w' at position 2"):
        ProgramTokens().encode("x = w ;")


def test_the_words_are_stored_and_compared() -> None:
    described = ProgramTokens().to_dict()
    assert isinstance(tokenizer_from_dict(described), ProgramTokens)
    with pytest.raises(TextError, match="not those of this version"):
        tokenizer_from_dict({**described, "words": [*VOCABULARY, "while"]})
