from .language_model import LanguageModel
from .masks import Mask
from .mixer import BatchFirst, CausalMixer, Mixer
from .mixers.aft import AFTConv, AFTConv2d, AFTFull, AFTLocal, AFTSimple
from .mixers.feedback import (
    FeedbackAttention,
    FeedbackTransformer,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
    Stack,
    StackFunction,
)
from .mixers.multi_head_attention import MultiHeadAttention, PrepareForMultiHeadAttention
from .registry import REGISTRY, ModelSettings, build_language_model
from .transformer.encoder_decoder import CausalStack, Decoder, Encoder, EncoderDecoder, Generator
from .transformer.feed_forward import FeedForward, GatedFeedForward
from .transformer.layers import TransformerLayer
from .transformer.positions import (
    EmbeddingsWithLearnedPositionalEncoding,
    EmbeddingsWithPositionalEncoding,
    TokenEmbeddings,
)

__version__: str

# The order in which a reader meets them.
__all__ = [
    "Mask",
    "Mixer",
    "CausalMixer",
    "BatchFirst",
    "PrepareForMultiHeadAttention",
    "MultiHeadAttention",
    "AFTFull",
    "AFTSimple",
    "AFTLocal",
    "AFTConv",
    "AFTConv2d",
    "FeedbackAttention",
    "FeedbackTransformerLayer",
    "FeedbackTransformer",
    "FeedbackTransformerKV",
    "Stack",
    "StackFunction",
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
