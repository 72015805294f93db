"""Masks: what the structured form says is what the dense one shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postil.masks import Mask, as_mask, check_mask, dense_mask, hide_padding


@st.composite
def masks(draw) -> tuple[Mask, int, int]:
    queries, keys = draw(st.integers(0, 9)), draw(st.integers(0, 12))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return (
        Mask(
            causal=draw(st.booleans()),
            keys=draw(st.sampled_from([None, torch.rand(keys, 2) > 0.4])),
            dense=draw(
                st.sampled_from([None, torch.rand(queries, keys, 2) > 0.4, torch.rand(1, keys, 1) > 0.4])
            ),
            window=draw(st.sampled_from([None, 1, 2, 5, 20])),
            offset=draw(st.integers(0, 6)),
        ),
        queries,
        keys,
    )


@given(masks())
def test_the_dense_form_says_the_rules_one_by_one(case: tuple[Mask, int, int]) -> None:
    mask, queries, keys = case
    allowed = dense_mask(mask, queries, keys).expand(queries, keys, 2)
    for i in range(queries):
        for j in range(keys):
            for b in range(2):
                rules = [
                    not mask.causal or j <= i + mask.offset,
                    mask.window is None or abs(i + mask.offset - j) < mask.window,
                    mask.keys is None or bool(mask.keys[j, b]),
                    mask.dense is None or bool(mask.dense.expand(queries, keys, 2)[i, j, b]),
                ]
                assert bool(allowed[i, j, b]) == all(rules)


@given(masks())
def test_dropping_rules_that_hide_nothing_changes_nothing(case: tuple[Mask, int, int]) -> None:
    mask, queries, keys = case
    reduced = mask.reduced(queries, keys)
    assert torch.equal(
        dense_mask(reduced, queries, keys).expand(queries, keys, 2),
        dense_mask(mask, queries, keys).expand(queries, keys, 2),
    )
    assert not (reduced.causal and queries == 1 and mask.offset >= keys - 1)


@given(masks(), st.data())
def test_a_cut_is_the_rectangle(case: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, queries, keys = case
    start = data.draw(st.integers(0, queries))
    stop = data.draw(st.integers(start, queries))
    first = data.draw(st.integers(0, min(keys, start + mask.offset)))
    last = data.draw(st.integers(first, keys))
    part = mask.cut(slice(start, stop), slice(first, last))
    whole = dense_mask(mask, queries, keys).expand(queries, keys, 2)
    cut = dense_mask(part, stop - start, last - first).expand(stop - start, last - first, 2)
    assert torch.equal(cut, whole[start:stop, first:last])


def test_padding_by_lengths() -> None:
    mask = Mask.padding(torch.tensor([3, 0, 2]), 3, causal=True)
    assert mask.keys is not None and mask.keys.T.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0]]
    for lengths in ([4, 1], [-1, 2]):
        with pytest.raises(ValueError, match=r"lengths .* must lie between 0 and seq_len=3"):
            Mask.padding(torch.tensor(lengths), 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "window=0"),
        ({"offset": -1}, ValueError, "offset=-1"),
        ({"keys": torch.ones(3)}, TypeError, "keys has dtype torch.float32"),
        ({"keys": torch.ones(3, dtype=torch.bool)}, ValueError, r"keys has shape \[3\]; expected 2 axes"),
        ({"dense": torch.ones(3, 3, dtype=torch.bool)}, ValueError, r"\[T or 1, S, B or 1\]"),
    ],
)
def test_what_cannot_be_a_mask(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(**options)


def test_none_tensors_and_masks_are_accepted_alike() -> None:
    dense = torch.ones(2, 3, 1, dtype=torch.int64)
    assert as_mask(None).is_full
    assert as_mask(dense).dense is not None and as_mask(dense).dense.dtype == torch.bool
    causal = Mask(causal=True)
    assert as_mask(causal) is causal
    with pytest.raises(ValueError, match=r"axis 1 \(S\) must be 4"):
        check_mask(as_mask(dense), 2, 4)


def test_hiding_padding_overwrites_whatever_is_there() -> None:
    x = torch.full((3, 2, 4), float("nan"))
    keys = torch.zeros(3, 2, dtype=torch.bool)
    assert (hide_padding(x, Mask(keys=keys)) == 0).all()
    assert hide_padding(x, Mask()) is x
