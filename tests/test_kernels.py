"""Where there is no compiler, every model with a kernel says so, once, and computes by its plain form."""

import subprocess
import sys
from pathlib import Path

import pytest

# What makes `compute`, a call of a model, and `KERNEL`.
MODELS = {
    "AFT": """
from postil.masks import Mask
from postil.mixers.aft import AFTLocal
from postil.mixers.aft.kernel import KERNEL
mixer, x = AFTLocal(32, 10, 3), torch.randn(10, 2, 32)
compute = lambda: mixer(query=x, key=x, value=x, mask=Mask(causal=True))
""",
    "Feedback": """
from postil.mixers.feedback import FeedbackAttention, FeedbackTransformerKV, FeedbackTransformerLayer
from postil.mixers.feedback.kernel import KERNEL
from postil.transformer.feed_forward import FeedForward
attn = FeedbackAttention(2, 32, 0.0, is_kv_precomputed=True)
layer = FeedbackTransformerLayer(
    d_model=32, attn=attn, feed_forward=FeedForward(32, 64, 0.0), dropout_prob=0.0
)
model = FeedbackTransformerKV(layer, 2, 32, 2)
compute = lambda: model(torch.randn(3, 2, 32))
""",
}
CHECK = """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert compute().isfinite().all()
    assert compute().isfinite().all()
told = [str(w.message) for w in seen if "compiled kernel" in str(w.message)]
assert len(told) == 1 and "no C++ compiler" in told[0], told
assert "plain PyTorch form" in KERNEL.status()
"""


# A fresh process, because a library that is loaded stays loaded.
@pytest.mark.parametrize("model", MODELS)
def test_without_a_compiler_the_plain_form_says_so_and_computes(model: str, tmp_path: Path) -> None:
    script = "import warnings, torch" + MODELS[model] + CHECK
    environment = {"PATH": str(tmp_path), "POSTIL_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
