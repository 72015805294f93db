r"""Postil's language models as `AutoModelForCausalLM`.

The adapter adds nothing to a model: it turns the arguments of `transformers` into calls of `forward`,
`prefill` and `step`, and their results back. So `generate` in all its modes, `Trainer` and `pipeline` work,
and greedy text is the text that `postil sample` writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from postil.integrations.huggingface import model_settings
from postil.integrations.transformers.cache import Group, PostilCache, group_rows
from postil.language_model import IGNORED, LanguageModel, next_token_loss
from postil.registry import build_language_model

__all__ = ["PostilConfig", "PostilForCausalLM"]


class PostilConfig(PretrainedConfig):
    r"""What `config.json` holds: the mixer, the settings of the model and the tokenizer."""

    model_type = "postil"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        mixer: str = "multi-head-attention",
        settings: dict[str, Any] | None = None,
        vocab_size: int = 256,
        tokenizer: dict[str, Any] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ):
        self.use_cache = use_cache
        self.mixer = mixer
        self.settings = settings or {}
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        shape = model_settings(self.settings)
        self.hidden_size, self.num_hidden_layers = shape.d_model, shape.n_layers
        self.max_position_embeddings = shape.seq_len
        kwargs["tie_word_embeddings"] = shape.tie_weights
        super().__init__(**kwargs)


class PostilForCausalLM(PreTrainedModel, GenerationMixin):
    r"""A language model over any registered mixer, as `transformers` calls it."""

    config_class = PostilConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    # In assisted generation a small model proposes tokens, and those that are refused are taken back. A state
    # cannot forget a token, so the library is told not to try.
    _is_stateful = True
    _tied_weights_keys = {"model.generator.projection.weight": "model.embedding.linear.weight"}  # noqa: RUF012

    def __init__(self, config: PostilConfig):
        super().__init__(config)
        self.model = build_language_model(config.mixer, model_settings(config.settings), config.vocab_size)
        self.post_init()

    # What does not fit is an error here, not a warning and a model that is half drawn at random; and weights
    # come from safetensors only, because anything else would be a pickle.
    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        r"""Load a model from a folder or from the Hub.

        Raises:
            ValueError: its tensors are not those that its configuration asks for.
            OSError: it has no `model.safetensors`.
        """
        kwargs["use_safetensors"] = True
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        wrong = {kind: keys for kind, keys in info.items() if keys and kind.endswith("keys")}
        if wrong:
            raise ValueError(f"{name}: its tensors do not fit its configuration: {wrong}")
        model._fill_tables()
        return (model, info) if output_loading_info else model

    # `transformers` would draw the parameters here. They have been drawn already, when the model was built.
    def _init_weights(self, module: torch.nn.Module) -> None:
        return

    # The loader builds a model whose tensors have no values yet, and fills in what the checkpoint holds.
    # Tables that are not stored, such as fixed positions, would stay empty, so they are computed anew.
    @torch.no_grad()
    def _fill_tables(self) -> None:
        tables = self._tables(self.model)
        if not tables:
            return
        shape = model_settings(self.config.settings)
        fresh = self._tables(build_language_model(self.config.mixer, shape, self.config.vocab_size))
        for name, table in tables.items():
            table.copy_(fresh[name])

    @staticmethod
    def _tables(model: LanguageModel) -> dict[str, Tensor]:
        stored = model.state_dict()
        return {name: table for name, table in model.named_buffers() if name not in stored}

    def get_input_embeddings(self) -> torch.nn.Module:
        r"""Give the table of tokens."""
        return self.model.embedding.linear

    def get_output_embeddings(self) -> torch.nn.Module:
        r"""Give the layer that makes logits."""
        return self.model.generator.projection

    # The library would cut the input to what its own cache has not seen, by a rule that changes with its
    # version. How much our state has read is known here, so the cut is made here.
    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        cache: Any = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> dict[str, Any]:
        r"""Pick what one call of the model needs."""
        cache = _one_cache(cache, past_key_values)
        seen = 0 if cache is None else cache.get_seq_length()
        # A chunk of a longer prompt holds only new columns, and its mask says where they stand.
        total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
        new = input_ids if seen + input_ids.shape[1] == total else input_ids[:, seen:]
        return {
            "input_ids": new,
            "cache": cache,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        cache_position: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        r"""Give logits, a cache if wanted, and the mean loss of `labels` (shifted here, -100 is left out).

        Padding stands on the left, or on the right where nothing is to be continued. Logits of padding are 0.
        `cache_position` is only compared with what the cache knows.

        Raises:
            ValueError: tokens after padding inside a row, or a cache of another kind or batch.
        """
        cache = _one_cache(cache, past_key_values)
        _check_position(cache_position, cache, input_ids.shape[1])
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        first, open_ended = _first_tokens(attention_mask, input_ids, cache)
        groups = group_rows(input_ids.shape[1] - first) if cache is None else cache.groups
        remember = bool(use_cache) and open_ended
        logits, groups = self._run(input_ids, attention_mask, groups, first, remember)
        if remember:
            seen = 0 if cache is None else cache.length
            cache = PostilCache(self.model, seen + input_ids.shape[1], groups)
        loss = None if labels is None else _mean_loss(logits, labels)
        output = CausalLMOutputWithPast(loss=loss, logits=logits[:, -logits_to_keep:])
        if remember:
            output[_CACHE] = cache
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def _run(
        self, ids: Tensor, mask: Tensor | None, groups: list[Group], first: Tensor, remember: bool
    ) -> tuple[Tensor, list[Group]]:
        # Padding may be a number that is no token. It is behind every token it could disturb.
        if mask is not None:
            ids = ids.masked_fill(mask[:, -ids.shape[1] :] == 0, 0)
        logits: Tensor | None = None
        after = []
        for rows, state in groups:
            start = int(first[rows[0]])
            if start == ids.shape[1]:
                after.append(Group(rows, state))
                continue
            y, state = self._read(ids[rows.to(ids.device), start:], state, remember)
            if len(groups) == 1 and start == 0:
                return y, [Group(rows, state)]
            logits = y.new_zeros(*ids.shape, y.shape[-1]) if logits is None else logits
            logits[rows.to(ids.device), start:] = y
            after.append(Group(rows, state))
        if logits is None:
            raise ValueError("every row of the batch is padding: there is nothing to read")
        return logits, after

    def _read(self, ids: Tensor, state: Any, remember: bool) -> tuple[Tensor, Any]:
        if state is None and not remember:
            return self.model(ids), None
        if ids.shape[1] == 1:
            logits, state = self.model.step(ids[:, 0], state)
            return logits[:, None], state
        return self.model.prefill(ids, state)


# The library has renamed the argument and the field; the output class knows which name is its own.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


# `generate` starts with an empty cache of the library's own. A filled one holds keys and values of another
# model.
def _one_cache(cache: Any, past_key_values: Any) -> PostilCache | None:
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one thing: give one of them")
    given = past_key_values if cache is None else cache
    if given is None or isinstance(given, PostilCache):
        return given
    if given.get_seq_length():
        raise ValueError(f"this model continues a cache it has returned, not a {type(given).__name__}")
    return None


def _check_position(position: Tensor | None, cache: PostilCache | None, length: int) -> None:
    seen = 0 if cache is None else cache.length
    if position is not None and position.tolist() != list(range(seen, seen + length)):
        raise ValueError(f"cache_position={position.tolist()}: {length} tokens after {seen} are expected")


# For each row the first new column that holds a token; and whether every row ends in one, so it can go on.
def _first_tokens(mask: Tensor | None, ids: Tensor, cache: PostilCache | None) -> tuple[Tensor, bool]:
    seen = 0 if cache is None else cache.length
    if cache is not None and sum(len(group.rows) for group in cache.groups) != ids.shape[0]:
        raise ValueError(f"the cache is not of a batch of {ids.shape[0]}")
    if mask is None:
        return torch.zeros(ids.shape[0], dtype=torch.int64), True
    if mask.shape != (ids.shape[0], seen + ids.shape[1]):
        raise ValueError(
            f"attention_mask {list(mask.shape)}: expected one column for each of {seen} tokens read and "
            f"{ids.shape[1]} given, [{ids.shape[0]}, {seen + ids.shape[1]}]"
        )
    real = mask.cpu() != 0
    before = (real.cumsum(1) == 0).sum(1)
    after = (real.flip(1).cumsum(1) == 0).sum(1)
    after = after.masked_fill(before == real.shape[1], 0)
    if ((before + real.sum(1) + after) != real.shape[1]).any() or (seen and after.any()):
        raise ValueError("attention_mask hides columns between tokens: pad on the left to continue a text")
    if cache is not None:
        read = torch.zeros(ids.shape[0], dtype=torch.int64)
        for rows, state in cache.groups:
            read[rows] = 0 if state is None else state.position
        if (read != (seen - before).clamp(min=0)).any():
            raise ValueError("attention_mask is not the one with which the cache was made")
    return (before - seen).clamp(min=0), not bool(after.any())


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    targets = labels[:, 1:]
    return next_token_loss(logits[:, :-1], targets) / (targets != IGNORED).sum().clamp(min=1)
