r"""The Feedback Transformer [fan2020]: every layer reads what all layers wrote at earlier positions.

The pages, in the order to read them:

1. `attention`: one position reads the memory, with distances instead of positions;
2. `memory`: a memory that grows without being copied, and the state of decoding;
3. `recurrence`: the model, literally, and what can be folded out of the loop;
4. `plain`: the whole sequence in PyTorch, without recording its steps;
5. `backward`: its gradient, by hand;
6. `kernel`: both compiled, the C++ beside it;
7. `operation`: all this as one differentiable function;
8. `layer`, `backbone`, `transformer`: the modules;
9. `from_parallel`: starting from a trained parallel transformer.
"""

from postil.mixers.feedback.attention import FeedbackAttention
from postil.mixers.feedback.from_parallel import from_parallel
from postil.mixers.feedback.kernel import kernel_status
from postil.mixers.feedback.layer import FeedbackTransformerLayer
from postil.mixers.feedback.memory import FeedbackState, Stack, StackFunction
from postil.mixers.feedback.operation import feedback_transformer
from postil.mixers.feedback.recurrence import feedback_transformer_reference
from postil.mixers.feedback.transformer import FeedbackTransformer, FeedbackTransformerKV

__all__ = [
    "FeedbackAttention",
    "FeedbackState",
    "FeedbackTransformer",
    "FeedbackTransformerKV",
    "FeedbackTransformerLayer",
    "Stack",
    "StackFunction",
    "feedback_transformer",
    "feedback_transformer_reference",
    "from_parallel",
    "kernel_status",
]
