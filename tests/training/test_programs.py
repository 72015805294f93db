"""The algorithmic task as the data of a run: pure functions of the update, masked loss, exact resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quietly import run

from postil.experiments import EXPERIMENTS
from postil.language_model import IGNORED
from postil.text.algorithmic import VOCABULARY, run_program
from postil.training import checkpoints
from postil.training.curves import read_metrics
from postil.training.data import find_corpus, prepare_text
from postil.training.saved import load_run
from postil.training.settings import TrainSettings


@pytest.fixture
def made(settings, monkeypatch: pytest.MonkeyPatch):
    """Settings of a small run on programs; a few hundred programs are enough to be judged by."""
    monkeypatch.setattr("postil.training.programs.VALIDATION", 40)

    def make(**changes) -> TrainSettings:
        changes = {"text": "algorithmic", "prompt": "x = 4 ; print x", "sample_tokens": 1, **changes}
        data = {"statements": 8, "variables": 2, **changes.pop("data", {})}
        model = {"seq_len": 48, "dropout": 0.0, **changes.pop("model", {})}
        return settings(**changes, data=data, model=model)

    return make


def data_of(s: TrainSettings):
    return prepare_text(s, find_corpus(s))


def losses(run: Path) -> list[tuple[int, float]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [(line["update"], line["loss"]) for line in lines if line["kind"] == "train"]


def programs_in(inputs: torch.Tensor) -> set[str]:
    return {" ".join(VOCABULARY[i] for i in row) for row in inputs.tolist()}


def test_a_batch_is_a_function_of_seed_update_and_rank(made) -> None:
    one, other = data_of(made()), data_of(made())
    for update in (1, 2, 700):
        for a, b in zip(one.batch(update), other.batch(update), strict=True):
            assert torch.equal(a, b)
    batches = [one.batch(1)[0], one.batch(2)[0], data_of(made(seed=2)).batch(1)[0]]
    assert len(set.union(*map(programs_in, batches))) == 3 * 4


def test_processes_share_a_batch_and_the_validation(made) -> None:
    data = data_of(made())
    whole = data.batch(5)
    parts = [data.batch(5, rank, 2) for rank in range(2)]
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
    alone = set.union(*(programs_in(x) for x, _ in data.validation()))
    shared = [programs_in(x) for rank in range(3) for x, _ in data.validation(rank, 3)]
    assert len(alone) == 40 and set.union(*shared) == alone


def test_validation_is_always_the_same_and_never_trained_on(made) -> None:
    data = data_of(made())
    for (a, _), (b, _) in zip(
        data.validation(limit=7), data_of(made(seed=9)).validation(limit=7), strict=True
    ):
        assert torch.equal(a, b)
    assert sum(x.shape[0] for x, _ in data.validation(limit=7)) == 7
    seen = set.union(*(programs_in(data.batch(update)[0]) for update in range(1, 50)))
    assert not seen & set.union(*(programs_in(x) for x, _ in data.validation()))


# What is written down as the corpus is the task and its solution, from one and the same programs.
def test_the_corpus_is_the_validation_programs_with_their_answers(made) -> None:
    corpus = find_corpus(made())
    lines = "".join(corpus.read()).splitlines()
    assert len(lines) == 40 and corpus.size == sum(len(line) + 1 for line in lines)
    for line in lines:
        words = [w for w in line.removesuffix("END").split()]
        bare, said = [], []
        for place, word in enumerate(words):
            told = word.isdigit() and words[place - 2] == "print"
            (said if told else bare).append(word)
        statements = [tuple(part.split()) for part in " ".join(bare).split(";") if part.strip()]
        assert [str(v) for v in run_program(statements) if v is not None] == said
    assert find_corpus(made(data={"variables": 3})).sha256 != corpus.sha256


def test_a_run_reports_printed_values_and_nothing_else(made) -> None:
    outcome = run(made())
    record = json.loads((outcome.path / "run.json").read_text())
    assert record["unit"] == "bits per printed value" and record["tokens"]["training"] is None
    assert 2.0 < record["unigram_bits"] < 3.4
    lines = read_metrics(outcome.path / "metrics.jsonl")
    final = lines[-1]
    assert final["kind"] == "final" and final["bits"] == outcome.bits
    assert final["accuracy"] == outcome.accuracy
    # Tokens are those that were read; the loss is over those that were asked.
    assert [line["tokens"] for line in lines if line["kind"] == "train"] == [192 * n for n in range(1, 21)]
    data = data_of(made())
    asked = sum(int((y != IGNORED).sum()) for _, y in data.validation())
    assert final["accuracy"] * asked == pytest.approx(round(final["accuracy"] * asked))


def test_a_model_learns_what_is_printed(made) -> None:
    easy = {"statements": 4, "variables": 1}
    outcome = run(made(updates=300, data=easy, optimizer={"batch_size": 16, "lr": 1e-2}))
    record = json.loads((outcome.path / "run.json").read_text())
    assert outcome.bits is not None and outcome.bits < 0.6 * record["unigram_bits"]


@pytest.mark.parametrize("cut", [1, 10])
def test_a_resumed_run_is_bit_identical(made, tmp_path: Path, cut: int) -> None:
    constant = {"optimizer": {"schedule": "constant"}}
    straight = run(made(out=str(tmp_path / "straight"), **constant))
    run(made(updates=cut, **constant))
    resumed = run(made(**constant), resume="auto")
    one, other = (checkpoints.latest(o.path / "checkpoints") for o in (straight, resumed))
    assert one is not None and other is not None
    for group in ("model", "optimizer"):
        for name, tensor in one.tensors[group].items():
            assert torch.equal(tensor, other.tensors[group][name]), name
    assert losses(straight.path) == losses(resumed.path)


def test_other_programs_are_refused_on_resumption(made) -> None:
    s = made(updates=2)
    run(s)
    with pytest.raises(ValueError, match="another text"):
        run(made(updates=4, data={"statements": 9}), resume="auto")


def test_a_saved_run_knows_its_words(made) -> None:
    saved = load_run(run(made(updates=2)).path)
    assert saved.tokenizer.kind == "programs" and saved.model.embedding.linear.num_embeddings == len(
        VOCABULARY
    )


def test_what_does_not_fit_is_said(made, capsys) -> None:
    (remark,) = data_of(made(model={"seq_len": 12})).remarks()
    assert "cut at model.seq_len=12" in remark
    assert data_of(made(model={"seq_len": 80})).remarks() == []
    with pytest.raises(ValueError, match="variables=6"):
        run(made(data={"variables": 6}))
    with pytest.raises(ValueError, match="words of their own"):
        run(made(data={"tokenizer": "bpe"}))
    with pytest.raises(ValueError, match=r"--prompt.*'It'"):
        run(made(prompt="It is"))
    assert not Path(str(made().out)).exists()


def test_the_experiment_names_the_task() -> None:
    s = EXPERIMENTS["algorithmic"]
    assert s.text == "algorithmic" and s.mixer == "feedback" and s.sample_tokens == 1
    replace(s, mixer="multi-head-attention").check()
