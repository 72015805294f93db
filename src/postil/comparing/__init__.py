r"""Comparing: the same budget for several models, and one report of what each made of it.

Whether a new mixer is better than attention is a question about training, and the answers in papers often
compare models of other sizes, trained on other texts for other lengths. Here each contender reads the same
tokens of the same text, or trains for the same time, once for each seed. With equal windows and batches it
even reads them in the same order, so that two curves differ by the models alone.

Speed, memory and the size of the decoding state do not depend on the seed. They are measured once, all
contenders side by side in the same minutes.
"""

from postil.comparing.plan import Contender, plan
from postil.comparing.report import as_markdown, as_page, as_table, curve_files
from postil.comparing.running import compare

__all__ = ["Contender", "as_markdown", "as_page", "as_table", "compare", "curve_files", "plan"]
