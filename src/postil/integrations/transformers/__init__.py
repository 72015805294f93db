r"""Postil's models inside `transformers`: import this, and `AutoModelForCausalLM` knows them.

    import postil.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pipeline("text-generation", model=model, tokenizer=tokenizer)("It is ")

The folder is what `postil export RUN --to huggingface` wrote. No code comes with it, so nobody has to trust
any.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from postil.integrations.transformers.cache import PostilCache
from postil.integrations.transformers.model import PostilConfig, PostilForCausalLM
from postil.integrations.transformers.tokenizer import PostilTokenizer

__all__ = ["PostilCache", "PostilConfig", "PostilForCausalLM", "PostilTokenizer"]

AutoConfig.register("postil", PostilConfig, exist_ok=True)
AutoModelForCausalLM.register(PostilConfig, PostilForCausalLM, exist_ok=True)
AutoTokenizer.register(PostilConfig, slow_tokenizer_class=PostilTokenizer, exist_ok=True)
