r"""Sequence-model papers as pages of running code."""

from postil.language_model import LanguageModel
from postil.masks import Mask
from postil.mixer import BatchFirst, CausalMixer, Mixer
from postil.mixers.multi_head_attention import MultiHeadAttention, PrepareForMultiHeadAttention
from postil.registry import REGISTRY, ModelSettings, build_language_model
from postil.transformer.encoder_decoder import CausalStack, Decoder, Encoder, EncoderDecoder, Generator
from postil.transformer.feed_forward import FeedForward, GatedFeedForward
from postil.transformer.layers import TransformerLayer
from postil.transformer.positions import (
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    TokenEmbeddings,
)

__version__ = "0.1.0"

# The order in which a reader meets them.
__all__ = [
    "Mask",
    "Mixer",
    "CausalMixer",
    "BatchFirst",
    "PrepareForMultiHeadAttention",
    "MultiHeadAttention",
    "FeedForward",
    "GatedFeedForward",
    "TokenEmbeddings",
    "EmbeddingsWithPositionalEncoding",
    "EmbeddingsWithLearnedPositionalEncoding",
    "TransformerLayer",
    "Encoder",
    "CausalStack",
    "Decoder",
    "EncoderDecoder",
    "Generator",
    "LanguageModel",
    "ModelSettings",
    "REGISTRY",
    "build_language_model",
]
