"""Embeddings: the equation of the waves, offsets for decoding, checkpoints, lengths named in errors."""

import math

import pytest
import torch

from postil.transformer import (
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    Generator,
    TokenEmbeddings,
    fixed_positions,
)

WITH_POSITIONS = [EmbeddingsWithPositionalEncoding, EmbeddingsWithLearnedPositionalEncoding]


def filled(form, **options):
    """Embeddings whose positions are not zero."""
    embeddings = form(8, 11, **options)
    if isinstance(embeddings, EmbeddingsWithLearnedPositionalEncoding):
        torch.nn.init.normal_(embeddings.positional_encodings)
    return embeddings


@pytest.mark.parametrize("d_model", [6, 7])
def test_the_fixed_table_is_its_equation(d_model):
    table = fixed_positions(40, d_model)
    for p in (0, 1, 17, 39):
        for column in range(d_model):
            angle = p / 10000 ** (2 * (column // 2) / d_model)
            wave = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[p, column].item() == pytest.approx(wave, abs=1e-7)


def test_a_shift_turns_each_pair_by_a_fixed_angle():
    table = fixed_positions(60, 8).double()
    turned = torch.complex(table[:, 0::2], table[:, 1::2])
    ratio = turned[7:] / turned[:-7]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=0, atol=1e-5)


def test_tokens_are_scaled_and_positions_added():
    ids = torch.randint(11, (5, 3))
    tokens = TokenEmbeddings(8, 11)
    torch.testing.assert_close(tokens(ids), tokens.linear.weight[ids] * 8**0.5)
    for form in WITH_POSITIONS:
        embeddings = filled(form, max_len=20)
        expected = embeddings.linear.weight[ids] * 8**0.5 + embeddings.positional_encodings[:5]
        torch.testing.assert_close(embeddings(ids), expected)


@pytest.mark.parametrize("form", [TokenEmbeddings, *WITH_POSITIONS])
def test_a_text_in_pieces_is_embedded_like_the_whole(form):
    embeddings = filled(form)
    ids = torch.randint(11, (9, 2))
    pieces = [embeddings(ids[:4]), embeddings(ids[4:5], offset=4), embeddings(ids[5:], 5)]
    assert torch.equal(torch.cat(pieces), embeddings(ids))


@pytest.mark.case("BC030")
@pytest.mark.parametrize("form", WITH_POSITIONS)
def test_too_long_a_text_is_told_both_lengths(form):
    embeddings = form(8, 11, max_len=16)
    ids = torch.zeros(16, 1, dtype=torch.int64)
    assert embeddings.max_len == 16
    assert embeddings(ids).shape == (16, 1, 8)
    with pytest.raises(ValueError, match=r"40 positions.*max_len=16"):
        embeddings(torch.zeros(40, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"17 positions.*max_len=16"):
        embeddings(ids[:1], offset=16)
    with pytest.raises(ValueError, match="position -1"):
        embeddings(ids[:1], offset=-1)


@pytest.mark.case("BC046")
def test_a_fixed_table_is_in_no_checkpoint_and_any_length_loads():
    trained = EmbeddingsWithPositionalEncoding(8, 11, max_len=64)
    assert set(trained.state_dict()) == {"linear.weight"}
    longer = EmbeddingsWithPositionalEncoding(8, 11, max_len=128)
    longer.load_state_dict(trained.state_dict())
    ids = torch.randint(11, (32, 2))
    assert torch.equal(longer(ids), trained(ids))


@pytest.mark.case("BC046")
def test_a_learned_table_of_another_length_is_told_both_lengths():
    trained = torch.nn.ModuleDict({"embed": EmbeddingsWithLearnedPositionalEncoding(8, 11, max_len=64)})
    longer = torch.nn.ModuleDict({"embed": EmbeddingsWithLearnedPositionalEncoding(8, 11, max_len=128)})
    with pytest.raises(ValueError, match=r"embed.positional_encodings.*64 positions.*max_len=128"):
        longer.load_state_dict(trained.state_dict())
    same = EmbeddingsWithLearnedPositionalEncoding(8, 11, max_len=64)
    same.load_state_dict(trained["embed"].state_dict())


def test_a_stored_fixed_table_loads_only_if_it_is_this_one():
    embeddings = EmbeddingsWithPositionalEncoding(8, 11, max_len=16)
    stored = {"linear.weight": torch.randn(11, 8), "positional_encodings": fixed_positions(50, 8)[:, None]}
    kept = dict(stored)
    embeddings.load_state_dict(stored)
    assert torch.equal(embeddings.linear.weight, stored["linear.weight"])
    # The caller's dictionary stays as it was.
    assert stored.keys() == kept.keys()
    stored["positional_encodings"] = stored["positional_encodings"].roll(1, 0)
    with pytest.raises(ValueError, match=r"\[50, 1, 8\].*d_model=8"):
        embeddings.load_state_dict(stored)


@pytest.mark.case("BC043")
def test_the_embedding_can_be_the_output_layer():
    embeddings, generator = filled(EmbeddingsWithLearnedPositionalEncoding), Generator(11, 8)
    generator.projection.weight = embeddings.linear.weight
    both = torch.nn.ModuleList([embeddings, generator])
    assert sum(p.numel() for p in both.parameters()) == 11 * 8 + 5000 * 8 + 11
    generator(embeddings(torch.randint(11, (4, 2)))).sum().backward()
    assert generator.projection.weight.grad is embeddings.linear.weight.grad


def test_scaled_embeddings_start_with_unit_variance():
    embedded = TokenEmbeddings(256, 500)(torch.arange(500)[:, None])
    assert embedded.std().item() == pytest.approx(1.0, abs=0.02)


def test_reset_draws_tokens_anew_and_positions_back_to_zero():
    embeddings = filled(EmbeddingsWithLearnedPositionalEncoding)
    before = embeddings.linear.weight.detach().clone()
    embeddings.reset_parameters()
    assert not torch.equal(embeddings.linear.weight, before)
    assert embeddings.positional_encodings.abs().max() == 0


@pytest.mark.case("BC033")
@pytest.mark.parametrize("wrong", [{"d_model": 0}, {"n_vocab": 0}, {"max_len": 0}])
def test_wrong_sizes_are_named(wrong):
    for form in WITH_POSITIONS:
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
            form(**{"d_model": 8, "n_vocab": 11, "max_len": 4, **wrong})
