"""`transformers` generates, trains and pads as our own code does, with real `transformers`."""

import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from postil.integrations.huggingface import PretrainedModel
from postil.integrations.states import batch_axes, leaves, map_leaves, probe
from postil.integrations.transformers import PostilForCausalLM, PostilTokenizer
from postil.registry import REGISTRY
from postil.sampling import Sampler, generate

from .making import ALPHABET, make_model

PROMPT = torch.tensor([[3, 7, 5, 16, 2, 9, 4, 1, 8, 6]])
GREEDY = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for name in REGISTRY:
        folders[name] = tmp_path_factory.mktemp(name)
        make_model(name).save_pretrained(folders[name])
    return folders


@pytest.fixture
def model(mixer, folders):
    return AutoModelForCausalLM.from_pretrained(folders[mixer])


def ours(model, ids, tokens=20):
    return generate(model.model, ids.tolist(), tokens=tokens, sampler=Sampler(0.0))


@pytest.mark.case("BC022")
def test_greedy_text_is_ours_with_and_without_cache(model):
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    with_cache = model.generate(PROMPT, **options)
    without = model.generate(PROMPT, **options, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    assert torch.equal(with_cache.sequences[:, 10:], ours(model, PROMPT))
    assert (torch.stack(with_cache.logits) - torch.stack(without.logits)).abs().max() < 1e-5
    assert len(with_cache.sequences[0, 10:].unique()) > 1


@pytest.mark.case("BC022")
def test_beams_follow_their_states(model):
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 4, "num_return_sequences": 3}
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_sampling_is_the_same_with_and_without_cache(model):
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(model.generate(PROMPT, do_sample=True, top_k=9, max_new_tokens=20, use_cache=use_cache))
    assert torch.equal(*texts)


@pytest.mark.case("BC023")
def test_a_shorter_call_leaves_nothing_behind(model, mixer, folders):
    first, second = PROMPT[:, :4], PROMPT.flip(1)
    calls = [(first, 8), (second, 20), (first, 8)]
    texts = [model.generate(ids, max_new_tokens=count, do_sample=False) for ids, count in calls]
    for (ids, count), text in zip(calls, texts, strict=True):
        fresh = AutoModelForCausalLM.from_pretrained(folders[mixer])
        assert torch.equal(text, fresh.generate(ids, max_new_tokens=count, do_sample=False))


@pytest.mark.case("BC027")
@pytest.mark.parametrize("positions", ["learned", "fixed", "none"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_rows_are_as_alone(mixer, positions, use_cache, tmp_path):
    make_model(mixer, positions=positions).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    long, short, other = PROMPT[:, :8], PROMPT[:, 5:7], PROMPT[:, 2:4]
    pad = torch.full((1, 6), 17)
    ids = torch.cat([torch.cat([pad, short], 1), long, torch.cat([pad, other], 1)])
    mask = (torch.arange(8) >= torch.tensor([[6], [0], [6]])).long()
    out = model.generate(
        ids,
        attention_mask=mask,
        **GREEDY,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for row, alone in enumerate([short, long, other]):
        expected = model.generate(alone, **GREEDY, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(out.sequences[row, 8:], expected.sequences[0, alone.shape[1] :])
        got = torch.stack(out.logits)[:, row]
        assert (got - torch.stack(expected.logits)[:, 0]).abs().max() < 1e-5
    beams = model.generate(ids, attention_mask=mask, max_new_tokens=8, num_beams=3, use_cache=use_cache)
    for row, alone in enumerate([short, long, other]):
        expected = model.generate(alone, max_new_tokens=8, num_beams=3)
        assert torch.equal(beams[row, 8:], expected[0, alone.shape[1] :])


def test_both_names_of_the_cache(model):
    whole = model(PROMPT).logits
    start = model(PROMPT[:, :6], use_cache=True)
    assert start.past_key_values is start.cache
    for named in ({"cache": start.cache}, {"past_key_values": start.past_key_values}):
        rest = model(PROMPT[:, 6:9], cache_position=torch.arange(6, 9), **named)
        assert (rest.logits - whole[:, 6:9]).abs().max() < 1e-5
        last = model(PROMPT[:, 9:], cache=rest.cache)
        assert (last.logits - whole[:, 9:]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="two names of one thing"):
        model(PROMPT, cache=start.cache, past_key_values=start.cache)
    with pytest.raises(ValueError, match="3 tokens after 6"):
        model(PROMPT[:, 6:9], cache=start.cache, cache_position=torch.arange(3))
    foreign = DynamicCache()
    foreign.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    with pytest.raises(ValueError, match="not a DynamicCache"):
        model(PROMPT, past_key_values=foreign)


def test_a_returned_cache_is_continued(model):
    start = model.generate(PROMPT, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    more = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(PROMPT, max_new_tokens=11, do_sample=False)
    for name in ("cache", "past_key_values"):
        assert torch.equal(model.generate(start.sequences, **{name: start.cache}, **more), expected)


def test_padding_that_cannot_be_right_is_refused(model):
    start = model(PROMPT, use_cache=True)
    assert model(PROMPT, attention_mask=torch.tensor([[1] * 8 + [0] * 2]), use_cache=True).cache is None
    for mask in ([1] * 4 + [0] + [1] * 5, [0, 1, 0] + [1] * 7):
        with pytest.raises(ValueError, match="pad on the left"):
            model(PROMPT, attention_mask=torch.tensor([mask]))
    with pytest.raises(ValueError, match="not the one with which"):
        model(PROMPT[:, :1], cache=start.cache, attention_mask=torch.tensor([[0] * 2 + [1] * 9]))
    with pytest.raises(ValueError, match="one column for each of 10"):
        model(PROMPT[:, :1], cache=start.cache, attention_mask=torch.tensor([[1]]))


def test_which_axis_is_the_batch(mixer):
    model = make_model(mixer).model
    sizes = map_leaves(
        lambda leaf, axis: axis is not None and leaf.shape[axis], probe(model, 5, 3), batch_axes(model)
    )
    assert {size for size in leaves(sizes) if size is not False} == {5}


def test_pipeline_writes_what_sample_writes(model, mixer, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[mixer])
    assert isinstance(tokenizer, PostilTokenizer)
    prompts = ["a bed.", "cab\ndog n"]
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = write(prompts, max_new_tokens=15, do_sample=False, batch_size=2)
    for prompt, [text] in zip(prompts, texts, strict=True):
        ids = torch.from_numpy(ALPHABET.encode(prompt).astype("int64"))[None]
        assert text["generated_text"] == prompt + ALPHABET.decode(ours(model, ids, 15)[0].tolist())


def test_the_tokenizer_turns_text_into_numbers_and_back(folders, tmp_path):
    tokenizer = PostilTokenizer(description=ALPHABET.to_dict())
    text = "a  bed.\n cab ."
    ids = tokenizer(text)["input_ids"]
    assert ids == ALPHABET.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    batch = tokenizer(["ab", text], padding=True, return_tensors="pt")
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["ab", text]
    assert batch["attention_mask"][0].tolist() == [0] * 12 + [1] * 2
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids
    with pytest.raises(ValueError, match="Z"):
        tokenizer("aZ")


def test_the_name_of_padding_in_a_text_is_text():
    from postil.text.characters import Bytes

    tokenizer = PostilTokenizer(description=Bytes().to_dict())
    assert tokenizer("a<pad>")["input_ids"] == list(b"a<pad>")
    assert tokenizer.decode(tokenizer("é<pad>\r").input_ids) == Bytes().decode(Bytes().encode("é<pad>\r"))


def test_trainer_lowers_the_loss_and_its_folder_is_ours(model, mixer, folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders[mixer])
    texts = ["abcd" * 4, "dcba" * 3, "abab" * 2, "cdcd"] * 8
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    tokenizer.padding_side = "right"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=30,
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=1000,
        ),
        train_dataset=rows,
        eval_dataset=rows[:8],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before
    trainer.save_model(str(tmp_path / "saved"))
    again = PretrainedModel.from_pretrained(tmp_path / "saved")
    model.eval()
    assert torch.equal(again(PROMPT), model(PROMPT).logits)


def test_loss_counts_what_is_labelled(model):
    labels = PROMPT.clone()
    labels[:, :4] = -100
    out = model(PROMPT, labels=labels)
    logits = model(PROMPT).logits[0, 3:9]
    assert torch.allclose(out.loss, torch.nn.functional.cross_entropy(logits, PROMPT[0, 4:]), atol=1e-6)


@pytest.mark.case("BC043")
def test_tied_weights_stay_tied_through_auto_classes(mixer, tmp_path):
    make_model(mixer, tie_weights=True).save_pretrained(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    for again in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "two")):
        assert again.model.generator.projection.weight is again.model.embedding.linear.weight
        assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)
    assert torch.equal(PretrainedModel.from_pretrained(tmp_path / "two")(PROMPT), model(PROMPT).logits)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.case("BC059")
def test_no_pickle_is_read_and_nothing_is_half_loaded(tmp_path):
    make_model("multi-head-attention").save_pretrained(tmp_path)
    marker = tmp_path / "marker"
    weights = tmp_path / "model.safetensors"
    good = weights.read_bytes()
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not marker.exists()
    weights.write_bytes(good)
    config = AutoConfig.from_pretrained(tmp_path)
    for layers in (2, 0):
        config.settings["n_layers"] = layers
        with pytest.raises(ValueError):
            PostilForCausalLM.from_pretrained(tmp_path, config=config)
