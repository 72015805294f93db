r"""Postil's tokenizers as `AutoTokenizer`.

The library thinks in names of tokens; Postil's tokenizers turn text into numbers at once. So the name of a
token here is its number and what it stands for, and text and numbers are turned into one another by the
tokenizer itself.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizer

from postil.text import tokenizer_from_dict

__all__ = ["PostilTokenizer"]


class PostilTokenizer(PreTrainedTokenizer):
    r"""A tokenizer of Postil, from its `description`; padding, on the left, is one number more.

    Raises:
        TextError: the description is not one of this library's.
    """

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    # Padding must not be a token that a text can hold. It has a number outside the model's vocabulary, which
    # the model never reads, and its name inside a text is text.
    def __init__(self, description: Any = None, **kwargs: Any):
        self.postil = tokenizer_from_dict(description)
        symbols = [self.postil.symbol(token) for token in range(self.postil.vocab_size)]
        self._names = [f"{token}:{symbol}" for token, symbol in enumerate(symbols)]
        self._numbers = {name: token for token, name in enumerate(self._names)}
        kwargs = {"pad_token": "<pad>", "padding_side": "left", "split_special_tokens": True, **kwargs}
        super().__init__(description=description, **kwargs)

    @property
    def vocab_size(self) -> int:
        r"""Count the tokens the model knows."""
        return self.postil.vocab_size

    def get_vocab(self) -> dict[str, int]:
        r"""Name every token, padding too."""
        return {**self._numbers, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [self._names[token] for token in self.postil.encode(text).tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._numbers.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        r"""Turn names of tokens into text; padding is none."""
        return self.postil.decode([self._numbers[token] for token in tokens if token in self._numbers])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        r"""Write nothing: the description stands in `tokenizer_config.json`."""
        return ()
