from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postil.text.reading import TextError
from postil.text.token_files import Tokens, write_tokens
from postil.text.windows import (
    Batches,
    batch,
    fixed_windows,
    sequential_windows,
    shuffled_windows,
    window_count,
    window_starts,
)


@pytest.fixture
def tokens(tmp_path: Path):
    def make(count: int) -> Tokens:
        return write_tokens(tmp_path / f"{count}.bin", [np.arange(count)], max(count, 2))

    return make


def read(order, n_windows: int, rows: int, updates: range, **options) -> list[int]:
    return [int(i) for update in updates for i in order(n_windows, rows, update=update, **options)]


def shuffled(n_windows: int, rows: int, updates: range, seed: int = 3, **options) -> list[int]:
    return read(shuffled_windows, n_windows, rows, updates, seed=seed, **options)


# Which windows there are


@pytest.mark.case("BC088")
@pytest.mark.parametrize("seq_len", [2, 8, 33])
def test_a_text_of_one_block_and_a_little_more(seq_len: int, tokens):
    with pytest.raises(TextError):
        window_count(seq_len, seq_len)
    for extra in (1, 2):
        text = tokens(seq_len + extra)
        batches = Batches(text, seq_len, batch=extra, shuffled=False)
        inputs, targets = batches[0]
        assert window_count(len(text), seq_len) == extra and batches.updates_per_epoch == 1
        assert targets[-1, -1] == seq_len + extra - 1 and inputs[0, 0] == 0
        everything = {
            tuple(row) for update in range(1) for row in Batches(text, seq_len, extra)[update][1].tolist()
        }
        assert len(everything) == extra and max(max(row) for row in everything) == seq_len + extra - 1


@pytest.mark.case("BC087")
def test_a_text_shorter_than_a_window_names_both_numbers(tokens):
    for make in (lambda: window_count(10, 32), lambda: Batches(tokens(10), 32, 1)):
        with pytest.raises(TextError) as caught:
            make()
        message = str(caught.value)
        assert "10 tokens" in message and "seq_len=32" in message and "smallest usable text has 33" in message


@given(st.integers(1, 40), st.integers(2, 500), st.data())
def test_windows_are_distinct_and_cover_the_text(seq_len: int, n_tokens: int, data: st.DataObject):
    if n_tokens <= seq_len:
        return
    shift = data.draw(st.integers(0, seq_len - 1))
    ids = np.arange(window_count(n_tokens, seq_len))
    starts = window_starts(ids, n_tokens, seq_len, shift)
    assert starts[0] == 0 and starts.max() <= n_tokens - 1 - seq_len
    assert (np.diff(starts) > 0).all() and (np.diff(starts) <= seq_len).all()
    left_out = n_tokens - 1 - seq_len - starts[-1]
    assert 0 <= left_out <= shift


# The order of an epoch


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**64), st.integers(0, 5))
def test_every_epoch_reads_every_window_once(n_windows: int, rows: int, seed: int, epoch: int):
    for order, options in ((shuffled_windows, {"seed": seed}), (sequential_windows, {})):
        first, last = epoch * n_windows, (epoch + 1) * n_windows
        updates = range(first // rows, -(-last // rows))
        ids = read(order, n_windows, rows, updates, **options)[first - updates[0] * rows :][:n_windows]
        assert sorted(ids) == list(range(n_windows))


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 6), st.integers(0, 40))
def test_ranks_share_one_stream(n_windows: int, rows: int, world: int, update: int):
    for order, options in ((shuffled_windows, {"seed": 1}), (sequential_windows, {})):
        together = order(n_windows, rows * world, update=update, **options)
        apart = [
            order(n_windows, rows, update=update, rank=rank, world=world, **options) for rank in range(world)
        ]
        assert np.concatenate(apart).tolist() == together.tolist()


@pytest.mark.case("BC049")
def test_stopping_inside_an_epoch_skips_and_repeats_nothing():
    straight = shuffled(64, 4, range(16))
    assert straight == shuffled(64, 4, range(5)) + shuffled(64, 4, range(5, 16))
    before, after = straight[:20], shuffled(64, 4, range(5, 16))
    assert set(after) == set(range(64)) - set(before) and len(after) == 44


@pytest.mark.case("BC051")
@pytest.mark.parametrize("stop", [1, 15, 16, 17, 37, 40])
def test_stopping_anywhere_in_three_epochs_continues_the_same_order(stop: int):
    straight = shuffled(64, 4, range(48))
    assert shuffled(64, 4, range(stop, 48)) == straight[4 * stop :]
    epochs = [tuple(straight[start : start + 64]) for start in range(0, 192, 64)]
    assert len(set(epochs)) == 3 and all(sorted(epoch) == list(range(64)) for epoch in epochs)


@pytest.mark.case("BC051")
def test_no_order_is_used_twice():
    orders = {
        tuple(shuffled(64, 64, range(epoch, epoch + 1), seed)) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.case("BC072")
def test_readers_draw_different_windows_and_the_same_again():
    ranks = [shuffled(64, 4, range(8), rank=rank, world=2) for rank in (0, 1)]
    assert not set(ranks[0]) & set(ranks[1]) and len(set(ranks[0] + ranks[1])) == 64
    assert ranks == [shuffled(64, 4, range(8), rank=rank, world=2) for rank in (0, 1)]
    assert ranks[0] != shuffled(64, 4, range(8), seed=4, rank=0, world=2)


def test_sequential_rows_go_on_where_they_were():
    ids = np.array([sequential_windows(12, 3, update=update) for update in range(8)])
    assert ids[:, 0].tolist() == [0, 1, 2, 3] * 2 and ids[:, 2].tolist() == [8, 9, 10, 11] * 2


# With 24 orders and 4800 draws each order is expected 200 times. The bound is the 1 - 1e-6 quantile of
# chi-square with 23 degrees of freedom.
def test_all_orders_are_equally_likely():
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = tuple(shuffled(4, 4, range(1), seed))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 73.7


# Neighbouring places should land anywhere: their distances are those of random pairs, a third of the text on
# average (standard error 0.0024).
def test_neighbours_in_the_order_are_strangers_in_the_text():
    order = np.array(shuffled(10_000, 10_000, range(1)))
    distance = np.abs(np.diff(order)).mean() / 10_000
    assert abs(distance - 1 / 3) < 0.012
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_a_text_of_any_size_costs_only_the_batch():
    ids = shuffled_windows(10**15, 64, seed=1, update=10**9)
    assert len(set(ids.tolist())) == 64 and ids.min() >= 0 and ids.max() < 10**15 and ids.max() > 10**14


@pytest.mark.parametrize(
    "options",
    [{"update": -1}, {"rank": 1}, {"rank": -1}, {"world": 0}, {"seed": -1}, {"batch": 0}, {"n_windows": 0}],
)
def test_numbers_out_of_range_are_named(options: dict):
    with pytest.raises(TextError, match=next(f"{name}={value}" for name, value in options.items())):
        shuffled_windows(**({"n_windows": 4, "batch": 2, "seed": 0, "update": 0} | options))


# Batches


def test_targets_are_the_next_tokens(tokens):
    inputs, targets = batch(tokens(50).part(10, 40), np.array([0, 25]), 4)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous()
    assert inputs.tolist() == [[10, 11, 12, 13], [35, 36, 37, 38]]
    assert targets.tolist() == [[11, 12, 13, 14], [36, 37, 38, 39]]


def test_batches_are_a_function_of_the_update(tokens):
    text = tokens(1000)
    straight = [Batches(text, 16, 4, seed=5)[update] for update in range(40)]
    fresh = Batches(text, 16, 4, seed=5)
    for update in reversed(range(40)):
        assert torch.equal(fresh[update][0], straight[update][0])
        assert torch.equal(fresh[update][1], straight[update][0] + 1)


def test_an_epoch_reads_the_text_once_and_another_cuts_it_elsewhere(tokens):
    text, seen = tokens(16 * 64 + 1), []
    batches = Batches(text, 16, 4, seed=5)
    assert batches.updates_per_epoch == 16
    for epoch in range(3):
        starts = np.concatenate([batches.starts(16 * epoch + step) for step in range(16)])
        assert len(set(starts.tolist())) == 64
        seen.append(set(starts.tolist()))
        targets = torch.cat([batches[16 * epoch + step][1].flatten() for step in range(16)])
        counts = torch.bincount(targets, minlength=len(text))[1:]
        assert (counts[:-16] >= 1).all() and int(counts.max()) <= 2
    assert len(seen[0] & seen[1]) < 64


def test_an_epoch_that_ends_inside_a_batch_is_filled_from_the_next(tokens):
    batches = Batches(tokens(10 * 8 + 1), 8, 4, seed=1, shuffled=False)
    assert batches.updates_per_epoch == 3
    starts = np.concatenate([batches.starts(update) for update in range(5)])
    assert sorted(starts[:10]) == sorted(starts[10:]) == list(range(0, 80, 8))


@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 3), st.integers(2, 90))
def test_fixed_windows_count_every_target_once(seq_len: int, rows: int, world: int, count: int):
    text = FIXED.part(7, 7 + count)
    found = [list(fixed_windows(text, seq_len, rows, rank=rank, world=world)) for rank in range(world)]
    targets = [int(t) for batches in found for _, targets in batches for t in targets.flatten()]
    assert sorted(targets) == list(range(8, 7 + count))
    assert all(torch.equal(inputs + 1, targets) for batches in found for inputs, targets in batches)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.fixture(scope="module", autouse=True)
def fixed(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FIXED
    FIXED = write_tokens(tmp_path_factory.mktemp("fixed") / "fixed.bin", [np.arange(100)], 256)


FIXED: Tokens


def test_a_validation_text_without_a_target_is_an_error(tokens):
    with pytest.raises(TextError, match="1 tokens, and needs 2"):
        list(fixed_windows(tokens(1), 8, 4))
