r"""The training loop.

An update is: choose windows, predict, measure the loss, follow the gradient. Around it stands everything
that makes a run trustworthy, and one idea carries most of it: **whatever an update needs is a pure function
of its number.** The windows, the learning rate and the dropout masks of update $n$ follow from the seed and
$n$ alone. A run that is killed and resumed at $n$ therefore goes on bit for bit, and evaluating or sampling
in between changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from postil.language_model import IGNORED, LanguageModel, NextTokenLoss
from postil.sampling import Sampler, generate
from postil.training.engine import largest, summed
from postil.training.evaluation import Score, evaluate
from postil.training.optimizer import make_optimizer, set_learning_rate
from postil.training.schedules import Schedule
from postil.training.settings import TrainSettings
from postil.training.sharding import full, gathered, recompute_layers
from postil.training.source import TrainingData
from postil.training.speed import flops_per_token, matrix_speed

__all__ = [
    "NonFiniteError",
    "Progress",
    "Session",
    "Unfinished",
    "seed_update",
    "start",
    "train_update",
    "validate",
    "write_sample",
]


class NonFiniteError(FloatingPointError):
    r"""Loss or gradient is NaN or infinite; the update was not made and the weights are as before."""


class Unfinished(Exception):
    r"""An evaluation that was broken off because the process has to leave."""


@dataclass
class Progress:
    r"""How far a run has come: what a checkpoint remembers besides parameters and optimizer."""

    update: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None


@dataclass
class Session:
    r"""All that one sitting of a run holds in memory."""

    settings: TrainSettings
    text: TrainingData
    fabric: Fabric
    model: LanguageModel
    loss: Any
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    total: int | None
    progress: Progress = field(default_factory=Progress)
    begun: dict[str, Any] = field(default_factory=dict)
    flops_per_token: int = 0
    flops_at_best: float = 1.0

    @property
    def evaluate_every(self) -> int:
        r"""Updates between evaluations."""
        return self.settings.evaluate_every or max(1, min(500, self.text.updates_per_epoch // 10))

    @property
    def sample_every(self) -> int:
        r"""Updates between samples; 0: there are none."""
        every = self.settings.sample_every
        return self.evaluate_every if every is None else every

    def utilisation(self, tokens_per_second: float) -> float:
        r"""Say which share of the devices' speed a training at this rate makes use of."""
        return tokens_per_second * self.flops_per_token / self.flops_at_best


def start(
    settings: TrainSettings, text: TrainingData, fabric: Fabric, build: Callable[[], LanguageModel]
) -> Session:
    r"""Build model and optimizer, alike in every process, and hand them to the engine.

    Raises:
        ValueError: the model or the schedule cannot be built from these settings.
    """
    total = settings.total_updates(text.updates_per_epoch)
    schedule = settings.make_schedule(total)
    torch.manual_seed(settings.seed)
    model = build()
    loss = NextTokenLoss(model)
    flops = flops_per_token(model)
    if settings.activation_checkpointing:
        recompute_layers(model)
    if settings.compile:
        # In place, so that the names of the parameters stay what they are.
        loss.compile()
    # Sharding replaces the parameters, so the optimizer is made of those that are there afterwards.
    wrapped = fabric.setup_module(loss)
    optimizer: Any = fabric.setup_optimizers(make_optimizer(model, settings.optimizer))
    return Session(
        settings,
        text,
        fabric,
        model,
        wrapped,
        optimizer,
        schedule,
        total,
        flops_per_token=flops,
        flops_at_best=_speed_of_all(settings, fabric),
    )


def _speed_of_all(settings: TrainSettings, fabric: Fabric) -> float:
    dtype = torch.float32 if settings.precision == "32" else torch.bfloat16
    own = matrix_speed(fabric.device, torch.float16 if settings.precision == "16-mixed" else dtype)
    return float(summed(fabric, torch.tensor(own, dtype=torch.float64)))


# Python's own hash would differ between processes, and adding the numbers would make neighbouring seeds
# share their updates. A seed sequence mixes them so that no two triples meet.
def seed_update(seed: int, update: int, rank: int) -> None:
    r"""Seed every generator of PyTorch for one update of one process."""
    mixed = np.random.SeedSequence([seed, update, rank]).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(mixed >> np.uint64(1)))


def train_update(session: Session) -> tuple[Score, float]:
    r"""Make the next update; return its score over all processes and the norm of its gradient.

    The gradient is that of the mean loss over all targets of the whole batch, however it is cut into
    micro-batches and spread over processes.

    Raises:
        NonFiniteError: naming update, loss, gradient norm and parameter.
    """
    s, fabric = session.settings, session.fabric
    update = session.progress.update + 1
    seed_update(s.seed, update, fabric.global_rank)
    inputs, targets = session.text.batch(update, fabric.global_rank, fabric.world_size)
    # While sequences grow, the beginning of each is taken: any data can be cut so, and row by row.
    length = s.length(update)
    inputs, targets = inputs[:, :length], targets[:, :length]
    count = summed(fabric, (targets != IGNORED).sum())
    # Data parallelism averages gradients over processes; the factor turns that into the sum it should be.
    scale = fabric.world_size / count.clamp_min(1)
    sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
    parts = _micro_batches(inputs, targets, s.optimizer.micro_batch_size)
    for number, (x, y) in enumerate(parts, start=1):
        with fabric.no_backward_sync(session.loss, enabled=_waits(session) and number < len(parts)):
            nats, correct = session.loss(fabric.to_device(x), fabric.to_device(y))
            fabric.backward(nats * scale)
        sums += torch.stack([nats.detach().double(), correct.double()])
    sums = summed(fabric, sums)
    score = Score(float(sums[0]), int(sums[1]), int(count))
    norm = _clipped_norm(session)
    _refuse_non_finite(session, update, score, norm)
    set_learning_rate(session.optimizer, session.schedule(update))
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)
    session.progress.update = update
    session.progress.tokens += s.optimizer.batch_size * length
    return score, norm


# One exchange for all micro-batches is enough where each process holds the whole gradient anyway. A sharded
# one would have to be kept whole until then, which is the memory that sharding is there to save.
def _waits(session: Session) -> bool:
    return session.fabric.world_size > 1 and session.settings.strategy != "fsdp"


def validate(
    session: Session, limit: int | None = None, pressing: Callable[[], bool] = lambda: False
) -> Score:
    r"""Score the model on the fixed validation windows, all or `limit` of them, each process its share.

    Raises:
        Unfinished: `pressing` became true in one of the processes; all leave together.
    """
    fabric = session.fabric
    batches = session.text.validation(fabric.global_rank, fabric.world_size, limit)
    own = evaluate(session.loss, _in_step(session, batches, pressing), fabric.device)
    sums = torch.tensor([own.nats, own.correct, own.tokens], dtype=torch.float64, device=fabric.device)
    nats, correct, tokens = summed(fabric, sums).tolist()
    return Score(nats, int(correct), int(tokens))


# Some processes have one batch less than others. Where layers are put together for every call, by all, those
# take part with a batch that has nothing to predict.
def _in_step(
    session: Session, batches: Iterator[tuple[Tensor, Tensor]], pressing: Callable[[], bool]
) -> Iterator[tuple[Tensor, Tensor]]:
    nothing = torch.zeros(1, session.settings.model.seq_len, dtype=torch.int64)
    while True:
        batch = next(batches, None)
        goes_on, leaves = largest(
            session.fabric, torch.tensor([batch is not None, pressing()]).long()
        ).tolist()
        if leaves:
            raise Unfinished
        if not goes_on:
            return
        yield batch or (nothing, torch.full_like(nothing, IGNORED))


def write_sample(session: Session) -> str:
    r"""Continue the prompt greedily: the same question after each part of the training.

    All processes must ask together.
    """
    s = session.settings
    prompt = torch.as_tensor(session.text.tokenizer.encode(s.prompt).astype(np.int64))
    with gathered(session.loss):
        ids = generate(session.model, [prompt], tokens=s.sample_tokens, sampler=Sampler(temperature=0.0))
    return session.text.tokenizer.decode(ids[0].tolist())


def _micro_batches(inputs: Tensor, targets: Tensor, size: int | None) -> list[tuple[Tensor, Tensor]]:
    size = size or max(1, inputs.shape[0])
    return list(zip(inputs.split(size), targets.split(size), strict=True))


# The norm is wanted even where nothing is clipped: it shows trouble before the loss does.
def _clipped_norm(session: Session) -> float:
    limit = session.settings.optimizer.clip or float("inf")
    # Clipping to a norm of NaN would make every gradient NaN, and the one at fault could not be named.
    strict = session.settings.precision != "16-mixed"
    try:
        norm = session.fabric.clip_gradients(
            session.loss, session.optimizer, max_norm=limit, error_if_nonfinite=strict
        )
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise
        gradients = [p.grad for p in session.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
    assert norm is not None
    return float(full(norm))


# A NaN that enters the weights stays there, and every checkpoint after it is lost. So it is stopped before
# the step, at every update and not only where something is printed.
def _refuse_non_finite(session: Session, update: int, score: Score, norm: float) -> None:
    # Loss scaling for float16 expects overflows now and then and skips the step itself.
    scaled = session.settings.precision == "16-mixed" and np.isfinite(score.nats)
    if (np.isfinite(score.nats) and np.isfinite(norm)) or scaled:
        return
    wrong = [
        n
        for n, p in session.model.named_parameters()
        if p.grad is not None and not full(p.grad).isfinite().all()
    ]
    session.optimizer.zero_grad(set_to_none=True)
    raise NonFiniteError(
        f"update {update}: loss {score.loss}, gradient norm {norm}, first non-finite gradient in "
        f"{wrong[0] if wrong else 'no parameter'}; the update was not made. A lower learning rate, a longer "
        f"warm-up or clipping usually helps"
    )
