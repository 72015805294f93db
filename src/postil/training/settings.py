r"""Everything that decides a training run, as one value.

The same dataclass is the command line (`--model.d_model 256`), the configuration file, what an experiment
fills in, and what `run.json` records. So a run is reproduced by its own record, and there is nowhere else
to look for a default.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from postil.mixer import check_probability, check_sizes
from postil.registry import REGISTRY, ModelSettings
from postil.training.schedules import SCHEDULES, Schedule, constant, doubling_length, noam, warmup_cosine
from postil.training.trackers import TRACKERS

__all__ = ["DataSettings", "OptimizerSettings", "TrainSettings", "settings_from_dict"]


@dataclass
class DataSettings:
    r"""How text becomes tokens and windows."""

    tokenizer: str = "characters"
    """characters, bytes, words or bpe."""
    vocab_size: int | None = None
    """Size of the vocabulary of bpe (None: 4096) or words (None: every word)."""
    valid_fraction: float = 0.1
    """Share of the text, at its end, that is kept for validation."""
    order: str = "shuffled"
    """Windows of an epoch in shuffled or sequential order."""
    statements: int = 100
    """Statements of a program, for --text algorithmic."""
    variables: int = 3
    """Variables of a program, 1 to 5."""


@dataclass
class OptimizerSettings:
    r"""AdamW, its schedule, and the size of an update."""

    lr: float = 1e-3
    """Peak learning rate; for noam the factor before the formula."""
    schedule: str = "cosine"
    """noam, cosine or constant, each after a linear warm-up."""
    warmup: int = 100
    """Updates of warm-up."""
    weight_decay: float = 0.1
    """Decay of weight matrices, times the learning rate of the update; biases and norms do not decay."""
    beta1: float = 0.9
    """Decay of Adam's mean gradient."""
    beta2: float = 0.98
    """Decay of Adam's mean squared gradient."""
    eps: float = 1e-8
    """Added to the root of the mean squared gradient."""
    clip: float = 1.0
    """Largest norm of the gradient of an update; 0 does not clip."""
    batch_size: int = 32
    """Sequences in an update, over all devices."""
    micro_batch_size: int | None = None
    """Sequences computed at a time on one device; None: its whole share. Smaller saves memory."""


@dataclass
class TrainSettings:
    r"""One training run."""

    mixer: str = "multi-head-attention"
    """The model: a name from the registry."""
    text: str | None = None
    """A corpus (tiny-shakespeare, enwik8, text8, python-docs), a file, a folder, - for standard input, or
    algorithmic for made programs."""
    experiment: str | None = None
    """The experiment whose values are the defaults."""
    out: str | None = None
    """Folder of the run; None: runs/ and the experiment's or mixer's name."""
    updates: int | None = None
    """Stop after so many updates."""
    epochs: float | None = None
    """Stop after so many passes over the training text, where updates is not given."""
    max_tokens: int | None = None
    """Stop after so many tokens."""
    max_time: float | None = None
    """Stop after so many seconds of training, this sitting."""
    seed: int = 1
    """Seed of parameters, order and dropout."""
    init_from: str | None = None
    """Run whose weights to start from: of the same model, or multi-head-attention for a feedback model."""
    seq_len_from: int | None = None
    """Length of sequences at first, doubled until it is seq_len; None: full length at once."""
    seq_len_over: int | None = None
    """Updates after which the length is full."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    evaluate_every: int | None = None
    """Updates between evaluations; None: a tenth of an epoch's, at most 500."""
    evaluate_windows: int = 64
    """Validation windows used during training, evenly spread; 0: all. The last evaluation reads all."""
    sample_every: int | None = None
    """Updates between printed samples; None: as often as evaluations, 0: never."""
    prompt: str = "It is "
    """Prompt of the printed samples."""
    sample_tokens: int = 25
    """Tokens of a printed sample, greedily chosen."""
    save_every: int | None = None
    """Updates between checkpoints; None: as often as evaluations."""
    keep: int = 2
    """Checkpoints kept, besides the best."""
    log_every: int = 10
    """Updates between lines of metrics.jsonl."""
    trackers: list[str] = field(default_factory=list)
    """Where the lines of metrics.jsonl go besides: csv, tensorboard, wandb, trackio."""
    devices: int = 1
    """Processes on each machine, one a device; under torchrun, as many as it started."""
    nodes: int = 1
    """Machines; more than one are started by torchrun."""
    accelerator: str = "auto"
    """auto, cpu or cuda."""
    strategy: str = "auto"
    """How several processes share a model: ddp, each holds it whole; fsdp, each a part of it; auto: ddp."""
    precision: str = "32"
    """32, bf16-mixed or 16-mixed."""
    compile: bool = False
    """Compile the model with torch.compile."""
    activation_checkpointing: bool = False
    """Compute each layer again for the backward pass, of a Feedback Transformer only what attention weighs
    by: less memory, a third more time."""
    threads: int | None = None
    """CPU threads a process; None: as PyTorch finds."""

    # Bad settings are refused before a folder is made or a byte of text is read.
    def check(self) -> None:
        r"""Check every value that can be checked without the text.

        Raises:
            ValueError: naming the setting, its value, and what is possible.
        """
        _check_known("mixer", self.mixer, REGISTRY)
        _check_known("optimizer.schedule", self.optimizer.schedule, SCHEDULES)
        _check_known("data.tokenizer", self.data.tokenizer, ("characters", "bytes", "words", "bpe"))
        _check_known("data.order", self.data.order, ("shuffled", "sequential"))
        if self.text == "algorithmic" and self.data.tokenizer != "characters":
            raise ValueError(
                f"data.tokenizer={self.data.tokenizer!r}: the programs of text='algorithmic' have words of "
                f"their own; leave it out"
            )
        _check_known("strategy", self.strategy, ("auto", "ddp", "fsdp"))
        _check_known("precision", self.precision, ("32", "bf16-mixed", "16-mixed"))
        for tracker in self.trackers:
            _check_known("tracker", tracker, TRACKERS)
        _check_known("accelerator", self.accelerator, ("auto", "cpu", "cuda"))
        if self.updates is None and self.epochs is None and self.max_tokens is None and self.max_time is None:
            raise ValueError("nothing would end this run: give updates, epochs, max_tokens or max_time")
        for name in ("updates", "epochs", "max_tokens", "max_time", "evaluate_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")
        for name in ("evaluate_windows", "sample_every", "sample_tokens", "seed"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        if not 0.0 < self.data.valid_fraction < 1.0:
            raise ValueError(f"data.valid_fraction={self.data.valid_fraction} must lie between 0 and 1")
        if self.text == "-" and self.world_size > 1:
            raise ValueError(
                f"text='-' can be read by one process, not by {self.world_size}: put it into a file first"
            )
        check_sizes(keep=self.keep, log_every=self.log_every, devices=self.devices, nodes=self.nodes)
        check_sizes(seq_len=self.model.seq_len, n_layers=self.model.n_layers)
        self._check_lengths()
        check_probability(dropout=self.model.dropout)
        self._check_optimizer()

    def _check_lengths(self) -> None:
        start, over, full = self.seq_len_from, self.seq_len_over, self.model.seq_len
        if start is None and over is None:
            return
        if start is None or over is None:
            raise ValueError(
                f"seq_len_from={start}, seq_len_over={over}: growing sequences need both, where to start and "
                f"after how many updates they have their full length"
            )
        check_sizes(seq_len_from=start, seq_len_over=over)
        if start > full:
            raise ValueError(f"seq_len_from={start} must not exceed model.seq_len={full}")

    def _check_optimizer(self) -> None:
        o = self.optimizer
        for name in ("lr", "weight_decay", "beta1", "beta2", "eps", "clip", "warmup"):
            if getattr(o, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(o, name)} must not be negative")
        if o.beta1 >= 1 or o.beta2 >= 1:
            raise ValueError(f"optimizer.beta1={o.beta1} and beta2={o.beta2} must be below 1")
        check_sizes(batch_size=o.batch_size)
        share, rest = divmod(o.batch_size, self.world_size)
        if rest:
            raise ValueError(
                f"optimizer.batch_size={o.batch_size} must be a multiple of the {self.world_size} processes"
            )
        if o.micro_batch_size is not None:
            check_sizes(micro_batch_size=o.micro_batch_size)
            if o.micro_batch_size > share:
                raise ValueError(
                    f"optimizer.micro_batch_size={o.micro_batch_size} exceeds a process's share of the "
                    f"batch, {share}"
                )

    @property
    def world_size(self) -> int:
        r"""Processes that train together."""
        return self.devices * self.nodes

    @property
    def tokens_per_update(self) -> int:
        r"""Tokens that one update reads at full length."""
        return self.optimizer.batch_size * self.model.seq_len

    def length(self, update: int) -> int:
        r"""Give the tokens of a sequence at an update, counted from 1."""
        if self.seq_len_from is None or self.seq_len_over is None:
            return self.model.seq_len
        return doubling_length(self.seq_len_from, self.model.seq_len, self.seq_len_over, update)

    def tokens_after(self, updates: int) -> int:
        r"""Count the tokens that so many updates read."""
        grown = min(updates, self.seq_len_over or 0)
        growing = sum(self.length(n) for n in range(1, grown + 1))
        return self.optimizer.batch_size * (growing + (updates - grown) * self.model.seq_len)

    @property
    def name(self) -> str:
        r"""What to call the run where it is given no folder."""
        return self.experiment or self.mixer

    def total_updates(self, updates_per_epoch: int) -> int | None:
        r"""Give the number of updates after which the run ends, `None` if only time ends it."""
        limits = []
        if self.updates is not None:
            limits.append(self.updates)
        elif self.epochs is not None:
            limits.append(max(1, round(self.epochs * updates_per_epoch)))
        if self.max_tokens is not None:
            limits.append(max(1, self._updates_within(self.max_tokens)))
        return min(limits, default=None)

    def _updates_within(self, tokens: int) -> int:
        growing = self.seq_len_over or 0
        left = tokens - self.tokens_after(growing)
        if left >= 0:
            return growing + left // self.tokens_per_update
        return bisect_right(range(growing), tokens, key=self.tokens_after) - 1

    def make_schedule(self, total_updates: int | None) -> Schedule:
        r"""Build the schedule that the settings name.

        Raises:
            ValueError: the schedule needs an end and the run has none, or its numbers do not fit.
        """
        o = self.optimizer
        if o.schedule == "noam":
            return noam(o.lr, o.warmup, self.model.d_model)
        if o.schedule == "constant":
            return constant(o.lr, o.warmup)
        if total_updates is None:
            raise ValueError(
                "optimizer.schedule='cosine' must know where it ends: give updates, epochs or max_tokens, "
                "or take --optimizer.schedule constant"
            )
        return warmup_cosine(o.lr, min(o.warmup, total_updates), total_updates)

    def to_dict(self) -> dict[str, Any]:
        r"""Write the settings as nested dictionaries, as they stand in `run.json`."""
        return asdict(self)


def settings_from_dict(values: dict[str, Any], kind: Any = TrainSettings) -> Any:
    r"""Read settings back from nested dictionaries.

    Raises:
        ValueError: a key is not a setting of this version; it is named.
    """
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}; {kind.__name__} has {', '.join(known)}")
    read = {}
    for name, value in values.items():
        factory: Any = known[name].default_factory
        nested = isinstance(value, dict) and is_dataclass(factory)
        read[name] = settings_from_dict(value, factory) if nested else value
    return kind(**read)


def _check_known(name: str, value: str, names: Any) -> None:
    if value not in names:
        raise ValueError(f"{name}={value!r} is not known; there are {', '.join(names)}")
