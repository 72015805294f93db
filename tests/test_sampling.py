"""Sampling: the shaping of distributions, and the loop that writes on, over a small model."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from postil.registry import REGISTRY, build_language_model
from postil.sampling import Sampler, distribution, draw, evaluating, generate, greedy, stream

V = 11


class RunningMean(nn.Module):
    """A causal model: each position sees the mean of all embedded tokens so far. State: (sum, count)."""

    def __init__(self, max_len=None, dropout=0.0, sharpness=6.0):
        super().__init__()
        self.max_len = max_len
        self.embedding = nn.Embedding(V, 16)
        self.positions = nn.Parameter(torch.randn(max_len or 512, 16))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(16, V)
        self.sharpness = sharpness
        self.reads = []
        self.graphs = False

    def prefill(self, ids, state=None):
        total, count = (0.0, 0) if state is None else state
        self.reads.append(ids.shape[1])
        self.graphs = self.graphs or torch.is_grad_enabled()
        x = self.embedding(ids) + self.positions[count : count + ids.shape[1]]
        sums = total + self.dropout(x).cumsum(dim=1)
        counts = torch.arange(count + 1, count + 1 + ids.shape[1])[None, :, None]
        logits = self.output(sums / counts.sqrt()) * self.sharpness
        return logits, (sums[:, -1], count + ids.shape[1])

    def step(self, ids, state=None):
        if state is not None:
            state = (state[0][:, None], state[1])
        logits, (total, count) = self.prefill(ids[:, None], state)
        return logits[:, 0], (total, count)

    def write_without_state(self, prompt, tokens):
        """Greedy, computing every prefix anew: the definition that the loop must agree with."""
        text = list(prompt)
        with evaluating(self):
            for _ in range(tokens):
                text.append(int(self.prefill(torch.tensor([text]))[0][0, -1].argmax()))
        return text[len(prompt) :]


@pytest.fixture
def model():
    return RunningMean(dropout=0.3)


def kept(probabilities):
    return (probabilities > 0).nonzero().flatten().tolist()


# --- shaping


def test_temperature_is_division_of_logits():
    logits = torch.randn(3, V)
    torch.testing.assert_close(distribution(logits, 0.7), torch.softmax(logits / 0.7, -1))


@pytest.mark.case("BC092")
def test_top_k_beyond_the_vocabulary_keeps_everything():
    logits = torch.randn(65)
    torch.testing.assert_close(distribution(logits, top_k=200), distribution(logits))


def test_top_k_keeps_exactly_k_and_among_equals_the_lowest_ids():
    probabilities = distribution(torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0]), top_k=3)
    assert kept(probabilities) == [0, 1, 4]
    assert probabilities.sum() == pytest.approx(1.0)


@pytest.mark.case("BC093")
@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_cold_is_greedy_with_ties_to_the_lowest_id_for_any_seed(temperature, model):
    tied = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert distribution(tied, temperature).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert greedy(tied).tolist() == [1, 0]
    sampler = Sampler(temperature=temperature)
    written = [
        generate(model, [[1, 2]], tokens=12, sampler=sampler, seed=seed).tolist() for seed in (0, 1, 77)
    ]
    assert written == [[model.write_without_state([1, 2], 12)]] * 3


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-6, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    probabilities = distribution(torch.tensor([-1000.0, 3.0, 2.0, 1000.0]), temperature)
    assert torch.isfinite(probabilities).all()
    assert probabilities.sum() == pytest.approx(1.0)


@pytest.mark.case("BC094")
def test_top_p_zero_keeps_the_most_likely_token():
    logits = torch.randn(7, V)
    assert torch.equal(distribution(logits, top_p=0.0).argmax(-1), greedy(logits))
    assert kept(distribution(logits[0], top_p=0.0)) == [int(greedy(logits[0]))]


@pytest.mark.case("BC095")
def test_the_token_that_crosses_the_threshold_stays():
    probabilities = distribution(torch.tensor([0.5, 0.41, 0.09]).log(), top_p=0.9)
    torch.testing.assert_close(probabilities, torch.tensor([0.5, 0.41, 0.0]) / 0.91)
    uniform = torch.rand(10_000, dtype=torch.float64)
    shares = draw(probabilities.expand(10_000, 3), uniform).bincount(minlength=3) / 10_000
    assert abs(shares[0] - 0.549) < 0.02
    assert abs(shares[1] - 0.451) < 0.02
    assert shares[2] == 0


@pytest.mark.case("BC099")
@pytest.mark.parametrize(
    "shape", [{"top_p": 0.0}, {"top_p": 0.5}, {"top_p": 1.0}, {"top_k": 1}, {"top_k": V}]
)
def test_temperature_zero_is_greedy_whatever_else_is_asked(shape):
    logits = torch.randn(50, V)
    probabilities = distribution(logits, 0.0, **shape)
    assert torch.equal(probabilities.argmax(-1), logits.argmax(-1))
    assert torch.equal(probabilities.sum(-1), torch.ones(50))


def test_top_k_then_top_p_on_what_it_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two that top-k leaves, the first holds 4/7 = 0.571: enough for 0.57, too little for 0.58.
    assert kept(distribution(logits, top_k=2, top_p=0.57)) == [0]
    assert kept(distribution(logits, top_k=2, top_p=0.58)) == [0, 1]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    st.none() | st.integers(1, 20),
    st.none() | st.floats(0, 1),
)
def test_a_distribution_is_one_and_keeps_the_most_likely_token(logits, temperature, top_k, top_p):
    logits = torch.tensor(logits)
    probabilities = distribution(logits, temperature, top_k, top_p)
    assert probabilities.min() >= 0
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)
    assert probabilities[greedy(logits)] > 0
    assert len(kept(probabilities)) <= (top_k or 20)


def test_impossible_tokens_have_probability_zero():
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    assert distribution(logits).tolist() == [0.0, 0.5, 0.0, 0.5]
    assert distribution(logits, top_k=3, top_p=0.99).tolist() == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("damage", [[0.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2])
def test_logits_without_a_finite_maximum_are_an_error(damage):
    logits = torch.stack([torch.tensor([1.0, 2.0]), torch.tensor(damage)])
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"maximum (nan|inf|-inf)"):
            distribution(logits, temperature)
    with pytest.raises(ValueError, match="maximum"):
        greedy(logits)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": -0.1},
        {"top_p": 1.5},
        {"top_p": float("nan")},
    ],
)
def test_numbers_out_of_range_are_named(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Sampler(**wrong)
    with pytest.raises(ValueError, match=f"{name}={value}"):
        distribution(torch.randn(V), **wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_shaped_in_float32(dtype):
    logits = torch.randn(4, V).to(dtype)
    assert torch.equal(distribution(logits, 0.8, 5, 0.9), distribution(logits.float(), 0.8, 5, 0.9))


# --- drawing


def test_draws_follow_the_distribution():
    # Chi-square with 5 degrees of freedom: beyond 20.5 with probability 0.001, and the seed is fixed.
    probabilities = torch.tensor([0.05, 0.3, 0.0, 0.2, 0.25, 0.1, 0.1])
    drawn = draw(probabilities.expand(10_000, 7), torch.rand(10_000, dtype=torch.float64))
    counts = drawn.bincount(minlength=7).double()
    expected = probabilities.double() * 10_000
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert (((counts - expected) ** 2)[possible] / expected[possible]).sum() < 20.5


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 2)
    assert draw(probabilities, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 3]


# --- writing on


@pytest.mark.case("BC023")
def test_nothing_is_kept_between_calls(model):
    first = generate(model, [[1, 2, 3]], tokens=8)
    longer = generate(model, [[4, 5]], tokens=40)
    assert torch.equal(generate(model, [[1, 2, 3]], tokens=8), first)
    assert torch.equal(generate(model, [[4, 5]], tokens=40), longer)
    assert torch.equal(longer[:, :8], generate(model, [[4, 5]], tokens=8))


@pytest.mark.case("BC027")
@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.0), Sampler(0.8, top_k=5, top_p=0.9)])
def test_a_row_of_mixed_lengths_equals_its_single_run(model, sampler):
    prompts = [[3, 1], [2, 7, 1, 8, 2, 8, 1, 8], [5], [5]]
    together = generate(model, prompts, tokens=20, sampler=sampler, seed=4)
    for row, prompt in enumerate(prompts):
        assert torch.equal(
            together[row], generate(model, [prompt], tokens=20, sampler=sampler, seed=4 + row)[0]
        )
    if sampler.temperature:
        # Two equal prompts in one batch still get two texts.
        assert not torch.equal(together[2], together[3])


@pytest.mark.case("BC030")
def test_a_text_longer_than_the_positions_is_cropped_with_one_notice():
    model = RunningMean(max_len=16)
    prompt = torch.arange(40) % V
    with pytest.warns(UserWarning, match=r"40 tokens and 30 .* 16 positions") as notices:
        written = generate(model, [prompt], tokens=30, sampler=Sampler(0.0))[0]
    assert len(notices) == 1
    assert written.shape == (30,)
    # The rule of the docstring, recomputed without any state.
    text = prompt.tolist()
    start = len(text) - 16
    for token in written.tolist():
        if len(text) - start > 16:
            start = len(text) - 8
        assert token == model.write_without_state(text[start:], 1)[0]
        text.append(token)


def test_reading_anew_costs_one_token_more_for_each_written():
    model = RunningMean(max_len=16)
    with pytest.warns(UserWarning):
        generate(model, [[1]], tokens=1600)
    assert sum(model.reads) <= 2 * 1600
    assert max(model.reads) == 8


@pytest.mark.parametrize("max_len", [1, 2, 5])
def test_the_shortest_tables_still_write(max_len):
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8]]
    model = RunningMean(max_len=max_len)
    with pytest.warns(UserWarning):
        together = generate(model, prompts, tokens=9, sampler=Sampler(0.0))
        for row, prompt in enumerate(prompts):
            assert torch.equal(together[row], generate(model, [prompt], tokens=9, sampler=Sampler(0.0))[0])


def test_no_notice_when_the_text_just_fits():
    model = RunningMean(max_len=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The last token written is never read, so 7 + 10 fit 16 positions.
        assert generate(model, [[1] * 7], tokens=10).shape == (1, 10)


@pytest.mark.case("BC034")
def test_batch_and_length_of_one_keep_their_axes(model):
    assert generate(model, [[3]], tokens=1).shape == (1, 1)
    four = generate(model, [[3], [4], [5], [6]], tokens=5)
    assert torch.equal(generate(model, [[3]], tokens=5), four[:1])


@pytest.mark.case("BC039")
def test_sampling_neither_sees_nor_disturbs_training(model):
    model.train()
    model.dropout.eval()
    model.output.train()
    before, rng = [m.training for m in model.modules()], torch.get_rng_state()
    first = generate(model, [[1, 2]], tokens=10, seed=3)
    torch.rand(5)
    torch.set_rng_state(rng)
    assert torch.equal(generate(model, [[1, 2]], tokens=10, seed=3), first)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == before
    assert not model.graphs


def test_an_abandoned_stream_leaves_the_model_and_the_gradients_alone(model):
    model.train()
    unfinished = stream(model, [[1, 2]], tokens=10)
    next(unfinished)
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    logits, _ = model.prefill(torch.tensor([[1, 2]]))
    logits.sum().backward()
    assert len(list(unfinished)) == 9


def test_a_failure_restores_training_mode(model):
    model.train()
    with pytest.raises(IndexError):
        generate(model, [[V]], tokens=1)
    assert all(module.training for module in model.modules())


@pytest.mark.case("BC096")
def test_a_row_that_ends_early_is_padded_and_the_others_go_on(model):
    prompts = [[1, 2], [7, 3, 3, 9], [4]]
    free = generate(model, prompts, tokens=30)
    # A token that some row writes in the middle of its text, and another does not write at all or later.
    ends = {v: [(row == v).nonzero().flatten().tolist() for row in free] for v in range(V)}
    stop = next(
        v for v, found in ends.items() if len({tuple(f[:1]) for f in found}) == 3 and min(map(len, found))
    )
    together = generate(model, prompts, tokens=30, stop=stop)
    lengths = []
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], tokens=30, seed=row, stop=stop)[0]
        lengths.append(len(alone))
        assert alone[-1] == stop
        assert torch.equal(alone, free[row, : len(alone)])
        assert torch.equal(together[row, : len(alone)], alone)
        assert (together[row, len(alone) :] == stop).all()
    assert len(set(lengths)) == 3
    assert together.shape[1] == max(lengths)


def test_a_stream_says_which_row_each_token_belongs_to(model):
    prompts = [[1, 2, 3, 4], [5]]
    texts = [[], []]
    for row, token in stream(model, prompts, tokens=6, seed=2):
        texts[row].append(token)
    assert texts == generate(model, prompts, tokens=6, seed=2).tolist()


def test_the_end_of_all_rows_ends_the_reading(model):
    generate(model, [[1, 2, 3], [4]], tokens=5)
    # One token, then the two left of the long prompt, then four of the five written; the last is not read.
    assert sum(model.reads) == 1 + 2 + 4


def test_asking_for_nothing_gives_nothing(model):
    assert generate(model, [[1]], tokens=0).shape == (1, 0)
    assert generate(model, [], tokens=5).shape == (0, 0)


def test_wrong_requests_are_refused_before_anything_is_read(model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        stream(model, [[1], []], tokens=3)
    with pytest.raises(ValueError, match="tokens=-1"):
        stream(model, [[1]], tokens=-1)
    assert model.reads == []


# --- every registered model


def registered(mixer, seq_len):
    settings = replace(REGISTRY[mixer].example, n_layers=2, seq_len=seq_len)
    language_model = build_language_model(mixer, settings, V)
    # Sharp logits: near-ties between tokens would make "the same text" a matter of the last bit.
    torch.nn.init.normal_(language_model.generator.projection.weight, std=2.0)
    return language_model.eval()


@pytest.mark.case("BC022")
@pytest.mark.parametrize("mixer", REGISTRY)
def test_a_state_writes_what_recomputing_every_prefix_writes(mixer):
    language_model, prompt = registered(mixer, 80), torch.randint(V, (10,)).tolist()
    written = generate(language_model, [prompt], tokens=64, sampler=Sampler(0.0))[0].tolist()
    with torch.no_grad():
        whole = torch.tensor([prompt + written])
        logits = language_model(whole)
        stepped, state = [], None
        for ids in whole.T:
            logits_t, state = language_model.step(ids, state) if state else first(language_model, ids)
            stepped.append(logits_t)
        torch.testing.assert_close(torch.stack(stepped, 1), logits, rtol=0, atol=1e-5)
    assert logits[0, 9:-1].argmax(-1).tolist() == written


def first(language_model, ids):
    logits, state = language_model.prefill(ids[:, None])
    return logits[:, 0], state


@pytest.mark.case("BC027")
@pytest.mark.case("BC030")
@pytest.mark.parametrize("mixer", REGISTRY)
def test_rows_equal_their_single_runs_within_and_beyond_the_positions(mixer):
    language_model = registered(mixer, 16)
    prompts = [torch.randint(V, (length,)) for length in (2, 8, 20)]
    with warnings.catch_warnings():
        # Whether there is a notice depends on whether the model has positions that can be used up.
        warnings.simplefilter("ignore")
        together = generate(language_model, prompts, tokens=25, seed=1)
        for row, prompt in enumerate(prompts):
            alone = generate(language_model, [prompt], tokens=25, seed=1 + row)
            assert torch.equal(together[row], alone[0])
