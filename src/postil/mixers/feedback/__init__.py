r"""The Feedback Transformer: every layer reads what all layers wrote at earlier positions.

A transformer computes one layer at all positions at once, and pays for it: layer $l$ can read only what layer
$l-1$ has made of the past. The best it knows of an earlier position, the output of the highest layer, is out
of reach for all layers below. Feedback memory hands it down. What a position leaves behind is one vector, a
learned mixture of all its layers, and every layer of every later position reads those vectors:

$$m_t = \sum_{l=0}^{L} \operatorname{softmax}(w)_l\; x_t^l, \qquad
x_t^{l} = \operatorname{Layer}^l\big(x_t^{l-1};\ m_1, \dots, m_{t-1}\big) \tag{1}$$

![Three positions in time, each a column of layers from x^0 up to x^L. All layers of a column flow into its
memory vector m; dashed lines lead from the memories of earlier positions to every layer of a later
one.](feedback.svg)

The price is time: a position cannot begin before the one before it has gone through all layers.

The pages, in the order to read them:

1. `attention`: one position reads the memory, with distances instead of positions;
2. `memory`: a memory that grows without being copied, and the state of decoding;
3. `recurrence`: the model, literally, and what can be folded out of the loop;
4. `plain`: the whole sequence in PyTorch, without recording its steps;
5. `backward`: its gradient, by hand;
6. `kernel`: both compiled, the C++ beside it;
7. `operation`: all this as one differentiable function;
8. `layer`: one layer at one position;
9. `decoding`: one position, as a function of tensors;
10. `backbone`, `transformer`: the models;
11. `from_parallel`: starting from a trained parallel transformer.

:paper: fan2020
"""

from postil.mixers.feedback.attention import FeedbackAttention
from postil.mixers.feedback.from_parallel import from_parallel
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
]


# ## What to try next
#
# Four symbols again and again: what comes next stood three positions before the one that asks. After 100
# updates both heads of layer 2 read just there. A memory is mostly the input of its position, for the task
# asks for no more. Which task would move the mixture up to the layers?
#
# ```python example T=16 B=16 D=24
# import torch
# from postil.language_model import next_token_loss
# from postil.registry import ModelSettings, build_language_model
# from postil.showing import pictures
#
# torch.manual_seed(0)
# shape = ModelSettings(d_model=24, n_layers=2, heads=2, seq_len=16, positions="none", dropout=0.0)
# model = build_language_model("feedback", shape, 8)
# optimizer = torch.optim.Adam(model.parameters(), 0.03)
# for _ in range(100):
#     ids = torch.randint(8, (16, 4)).repeat(1, 4)
#     loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
#     optimizer.zero_grad()
#     loss.backward()
#     optimizer.step()
# memory, *reads = pictures(model, ids[0])
# plots = {
#     "What a memory is made of": dict(zip(memory.columns, memory.values[0].tolist())),
#     "Layer 1, head 1: positions read memories": reads[0].values,
#     "Layer 2, head 1": reads[2].values,
#     "Layer 2, head 2": reads[3].values,
# }
# ```
#
# On a text, and the same pictures of what was learnt there:
#
# ```sh
# postil train --mixer feedback --max-time 300 --out runs/feedback
# postil show runs/feedback --prompt "It is the east, and Juliet is the sun."
# ```
