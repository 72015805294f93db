"""Stacks: what each may read, decoding with a state, and the whole encoder-decoder at work."""

import pytest
import torch
from test_layers import layer
from toy_mixers import TorchAttention

from postil.masks import Mask
from postil.transformer import (
    CausalStack,
    Decoder,
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    Encoder,
    EncoderDecoder,
    Generator,
)


def changed_rows(module, x, at, **named):
    """Positions whose output moves, bit for bit, when the input at one position does."""
    other = x.clone()
    other[at] += 1
    return (module(x, **named) != module(other, **named)).flatten(1).any(1).nonzero().flatten().tolist()


def model(d_model=8, vocab=11):
    return EncoderDecoder(
        Encoder(layer(d_model), 2),
        Decoder(layer(d_model, src=True), 2),
        EmbeddingsWithPositionalEncoding(d_model, vocab),
        EmbeddingsWithLearnedPositionalEncoding(d_model, vocab, max_len=32),
        Generator(vocab, d_model),
    )


def test_an_encoder_reads_everything_or_what_its_mask_allows():
    encoder, x = Encoder(layer(), 2), torch.randn(6, 2, 8)
    assert changed_rows(encoder, x, 3) == [0, 1, 2, 3, 4, 5]
    assert changed_rows(encoder, x, 3, mask=Mask(causal=True)) == [3, 4, 5]
    # A hidden position still writes its own row.
    padded = Mask.padding(torch.tensor([3, 3]), 6)
    assert changed_rows(encoder, x, 3, mask=padded) == [3]


@pytest.mark.parametrize("mask", [None, Mask(), torch.ones(1, 6, 1, dtype=torch.bool)])
def test_a_causal_stack_never_reads_the_future(mask):
    stack, x = CausalStack(layer(), 3), torch.randn(6, 2, 8)
    assert changed_rows(stack, x, 3, mask=mask) == [3, 4, 5]
    assert torch.equal(stack(x, mask), stack(x, Mask(causal=True)))


def test_a_causal_stack_can_hide_more_than_the_future():
    stack, x = CausalStack(layer(), 2), torch.randn(6, 2, 8)
    assert changed_rows(stack, x, 3, mask=Mask.padding(torch.tensor([3, 3]), 6)) == [3]


def test_a_causal_stack_and_an_encoder_load_each_other():
    stack, encoder, x = CausalStack(layer(), 2), Encoder(layer(), 2), torch.randn(6, 2, 8)
    encoder.load_state_dict(stack.state_dict())
    assert torch.equal(encoder(x, Mask(causal=True)), stack(x))


def test_the_sum_is_normalised_once_at_the_end():
    y = Encoder(layer(d_model=32), 4)(100 * torch.randn(6, 2, 32))
    torch.testing.assert_close(y.mean(-1), torch.zeros(6, 2), rtol=0, atol=1e-6)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(6, 2), rtol=0, atol=1e-3)


@pytest.mark.case("BC022")
@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_decoding_a_causal_stack_gives_the_rows_of_forward(cut):
    stack, x = CausalStack(layer(), 3).double(), torch.randn(7, 2, 8).double()
    rows, state = [], None
    if cut:
        y, state = stack.prefill(x[:cut])
        rows.extend(y)
    for x_t in x[cut:]:
        y_t, state = stack.step(x_t, state)
        rows.append(y_t)
    torch.testing.assert_close(torch.stack(rows), stack(x), rtol=0, atol=1e-10)
    assert len(state) == 3


def test_a_chunk_may_follow_a_chunk_and_a_state_may_be_used_twice():
    stack, x = CausalStack(layer(), 2).double(), torch.randn(7, 2, 8).double()
    first, state = stack.prefill(x[:3])
    again = [stack.prefill(x[3:], state)[0] for _ in range(2)]
    assert torch.equal(*again)
    torch.testing.assert_close(torch.cat([first, again[0]]), stack(x), rtol=0, atol=1e-10)


def test_a_state_of_another_depth_is_refused():
    _, state = CausalStack(layer(), 2).prefill(torch.randn(3, 1, 8))
    with pytest.raises(ValueError, match=r"2 layers, this stack has 3"):
        CausalStack(layer(), 3).step(torch.randn(1, 8), state)


def test_a_decoder_reads_its_past_and_all_of_the_memory():
    decoder, x, memory = Decoder(layer(src=True), 2), torch.randn(5, 2, 8), torch.randn(7, 2, 8)
    assert changed_rows(decoder, x, 3, memory=memory) == [3, 4]
    assert changed_rows(lambda m: decoder(x, m), memory, 6) == [0, 1, 2, 3, 4]
    src_mask = Mask.padding(torch.tensor([6, 6]), 7)
    assert changed_rows(lambda m: decoder(x, m, src_mask), memory, 6) == []


@pytest.mark.case("BC022")
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_decoding_a_decoder_gives_the_rows_of_forward(cut):
    decoder = Decoder(layer(src=True), 2).double()
    x, memory = torch.randn(5, 2, 8).double(), torch.randn(7, 2, 8).double()
    src_mask = Mask.padding(torch.tensor([7, 4]), 7)
    rows, state = [], None
    if cut:
        y, state = decoder.prefill(x[:cut], memory, src_mask)
        rows.extend(y)
    for x_t in x[cut:]:
        y_t, state = decoder.step(x_t, memory, src_mask, state)
        rows.append(y_t)
    expected = decoder(x, memory, src_mask)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=0, atol=1e-10)


def test_a_decoder_needs_layers_that_read_a_memory():
    with pytest.raises(ValueError, match="needs src_attn"):
        Decoder(layer(), 2)


def test_an_encoder_decoder_is_its_parts():
    whole = model()
    src, tgt = torch.randint(11, (7, 2)), torch.randint(11, (5, 2))
    src_mask = Mask.padding(torch.tensor([7, 4]), 7)
    memory = whole.encoder(whole.src_embed(src), src_mask)
    expected = whole.decoder(whole.tgt_embed(tgt), memory, src_mask)
    assert torch.equal(whole(src, tgt, src_mask), expected)
    assert whole.generator(expected).shape == (5, 2, 11)


def test_padding_of_the_source_changes_nothing():
    whole = model()
    src, tgt = torch.randint(11, (7, 1)), torch.randint(11, (5, 1))
    alone = whole(src[:4], tgt)
    padded = whole(src, tgt, Mask.padding(torch.tensor([4]), 7))
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-6)


def test_an_encoder_decoder_learns_to_reverse():
    """The whole assembly at work: attention to the source is the only way to know what to write."""
    width, length = 32, 5

    def attentive(src):
        return layer(width, src=src, mixer=lambda d_model: TorchAttention(d_model, 4))

    whole = EncoderDecoder(
        Encoder(attentive(False), 1),
        Decoder(attentive(True), 1),
        EmbeddingsWithPositionalEncoding(width, 9, max_len=8),
        EmbeddingsWithLearnedPositionalEncoding(width, 9, max_len=8),
        Generator(9, width),
    )
    optimizer = torch.optim.AdamW(whole.parameters(), lr=5e-3)
    for _ in range(150):
        src = torch.randint(1, 9, (length, 64))
        tgt = torch.cat([torch.zeros(1, 64, dtype=torch.int64), src.flip(0)])
        logits = whole.generator(whole(src, tgt[:-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    src = torch.randint(1, 9, (length, 200))
    written = torch.zeros(1, 200, dtype=torch.int64)
    memory = whole.encode(src)
    for _ in range(length):
        logits = whole.generator(whole.decode(memory, None, written)[-1])
        written = torch.cat([written, logits.argmax(-1)[None]])
    # Chance is 1/8 a token.
    assert (written[1:] == src.flip(0)).float().mean() > 0.95


def test_a_generator_gives_logits():
    generator, x = Generator(11, 8), torch.randn(3, 2, 8)
    assert set(generator.state_dict()) == {"projection.weight", "projection.bias"}
    expected = x @ generator.projection.weight.T + generator.projection.bias
    torch.testing.assert_close(generator(x), expected)
    assert generator(x[0]).shape == (2, 11)
