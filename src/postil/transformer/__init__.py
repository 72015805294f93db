r"""What stands around a mixer: feed-forward networks, positions, layers, and stacks of layers."""

from postil.transformer.encoder_decoder import CausalStack, Decoder, Encoder, EncoderDecoder, Generator
from postil.transformer.feed_forward import FEED_FORWARDS, FeedForward, GatedFeedForward, feed_forward
from postil.transformer.layers import TransformerLayer, clone_layers
from postil.transformer.positions import (
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    TokenEmbeddings,
    fixed_positions,
)

__all__ = [
    "FEED_FORWARDS",
    "CausalStack",
    "Decoder",
    "EmbeddingsWithLearnedPositionalEncoding",
    "EmbeddingsWithPositionalEncoding",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "GatedFeedForward",
    "Generator",
    "TokenEmbeddings",
    "TransformerLayer",
    "clone_layers",
    "feed_forward",
    "fixed_positions",
]
