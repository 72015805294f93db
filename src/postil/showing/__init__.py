r"""Showing: pictures of what a model has learnt, for a text of your choice.

All mixers here compute weighted means over earlier positions, and weights can be looked at: attention's, one
matrix a head; those of the Attention Free Transformer, where every channel has its own; the Feedback
Transformer's, which are of memories. Beside them stand the learned biases, which no text changes.

A picture of weights says what was *read*, not why, nor what the reading was used for. It is a good question
to start from and a poor proof.
"""

from postil.showing.drawing import draw
from postil.showing.page import as_page
from postil.showing.weights import Picture, pictures

__all__ = ["Picture", "as_page", "draw", "pictures"]
