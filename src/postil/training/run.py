r"""A training run from its settings to its folder.

A run leaves a folder behind that explains itself: `run.json` says what was trained on what, with which
versions; `metrics.jsonl` how it went; `checkpoints/` holds the model; `loss.svg` shows the curve. Started
again with `resume`, it goes on as if it had never stopped.
"""

from __future__ import annotations

import platform
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from rich.console import Console

from postil import durable
from postil.language_model import LanguageModel
from postil.registry import build_language_model
from postil.text import Corpus, TextError, tokenizer_from_dict
from postil.training import checkpoints
from postil.training.beginning import begin_from
from postil.training.capture import conditions, differences, restore_optimizer
from postil.training.checkpoints import Checkpoint
from postil.training.curves import draw_curves
from postil.training.data import find_corpus, prepare_text
from postil.training.display import Display
from postil.training.engine import as_launched, largest, make_fabric, together
from postil.training.loop import Progress, Session, start
from postil.training.processes import is_rank
from postil.training.ranks import train_in_ranks
from postil.training.run_directory import RunDirectory, RunDirectoryError
from postil.training.saved import as_stored
from postil.training.settings import TrainSettings, settings_from_dict
from postil.training.sharding import share
from postil.training.signals import StopRequest, stopping_gracefully
from postil.training.sitting import Sitting
from postil.training.trackers import open_trackers

__all__ = ["Outcome", "train"]


@dataclass(frozen=True)
class Outcome:
    r"""How a sitting ended: why, after which update, and how well it did on all validation data."""

    path: Path
    reason: str
    update: int
    bits: float | None
    unit: str
    exit_code: int = 0
    accuracy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        r"""Write the outcome as JSON can hold it."""
        return {**asdict(self), "path": str(self.path)}


def train(
    settings: TrainSettings,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> Outcome:
    r"""Train a language model as `settings` say, into the folder `settings.out`.

    `resume="auto"` goes on from the latest good checkpoint if there is one, a path from that one.
    `overwrite` removes the run that is there. With several devices, each is served by a process of its own,
    and this one waits for them.

    Raises:
        ValueError: a setting is impossible, or contradicts the run that is resumed.
        TextError: the text cannot be used.
        RunDirectoryError: the folder holds another run, or cannot be written.
        CheckpointError: a checkpoint that was asked for cannot be read.
        NonFiniteError: loss or gradient became NaN or infinite.
        RankError: one of several processes was lost; it is named.
    """
    settings = as_launched(settings)
    settings.check()
    fabric = make_fabric(settings)
    console = console or Console(highlight=False)
    if settings.world_size > 1 and not is_rank():
        request = {"settings": settings.to_dict(), "resume": resume, "overwrite": overwrite}
        outcome = train_in_ranks({**request, "quiet": console.quiet}, settings.devices)
        return Outcome(**{**outcome, "path": Path(outcome["path"])})
    with together(settings, fabric):
        console.quiet = console.quiet or not fabric.is_global_zero
        return _train(settings, fabric, resume, overwrite, console)


def _train(
    settings: TrainSettings, fabric: Fabric, resume: str | None, overwrite: bool, console: Console
) -> Outcome:
    path = Path(settings.out) if settings.out else durable.inside("runs", settings.name, "name of the run")
    with stopping_gracefully() as stop:
        with stop.at_once():
            there = checkpoints.steps(path / "checkpoints")
            checkpoint = checkpoints.find(path / "checkpoints", resume) if resume else None
            session = _prepare(settings, fabric, checkpoint, console)
        if not fabric.is_global_zero:
            return _sit(session, None, path, stop, console)
        with RunDirectory.open(path, resume=resume is not None, overwrite=overwrite) as directory:
            # The lock comes late, since a run that cannot start shall leave no trace. Whoever held it until
            # now may have trained on, and what was read before would not be the latest.
            if resume and checkpoints.steps(directory.checkpoints) != there:
                raise RunDirectoryError(f"{path}: another run saved checkpoints here just now; start again")
            # Going back is asked for by name. On the way back from a damaged one nothing is thrown away: it
            # may still be of use to whoever repairs it.
            if resume not in (None, "auto"):
                checkpoints.discard_later(directory.checkpoints, session.progress.update)
            _record(session, directory)
            return _sit(session, directory, path, stop, console)


# ## Before the first update
def _prepare(
    settings: TrainSettings, fabric: Fabric, checkpoint: Checkpoint | None, console: Console
) -> Session:
    tokenizer = None if checkpoint is None else tokenizer_from_dict(checkpoint.metadata["tokenizer"])
    with fabric.rank_zero_first():
        corpus = find_corpus(settings)
        if checkpoint is not None:
            _check_same_text(checkpoint, corpus)
        text = prepare_text(settings, corpus, tokenizer)
    if checkpoint is not None:
        settings.model = as_stored(settings, checkpoint).model
    # A default that was found is a choice from here on: a resumed run must not find another.
    settings.text = settings.text or text.corpus.name
    for remark in text.remarks():
        console.print(remark, style="yellow", markup=False)
    begun: dict[str, Any] = {}

    # What is resumed has left its beginning behind, and the run that it came from may be gone.
    def build() -> LanguageModel:
        model = build_language_model(settings.mixer, settings.model, text.tokenizer.vocab_size)
        for remark in getattr(model.backbone, "remarks", list)():
            console.print(remark, style="yellow", markup=False)
        if settings.init_from is not None and checkpoint is None:
            begun.update(begin_from(settings.init_from, model, settings, text.tokenizer))
        return model

    session = start(settings, text, fabric, build)
    session.begun = begun
    if checkpoint is not None:
        _restore(session, checkpoint, console)
    elif begun:
        console.print("beginning from {path}, {mixer} after update {update}".format(**begun), markup=False)
    _check_prompt(session)
    _check_same_start(session)
    return session


# The first sample is written after minutes of training, which would be lost.
def _check_prompt(session: Session) -> None:
    every, total = session.sample_every, session.total
    if every == 0 or (total is not None and every > total):
        return
    try:
        session.text.tokenizer.encode(session.settings.prompt)
    except TextError as error:
        raise ValueError(
            f"--prompt, for the samples during training (--sample-every 0: none): {error}"
        ) from None


# A folder that only one of several machines can see would let the others begin anew, beside it.
def _check_same_start(session: Session) -> None:
    own = session.progress.update
    first, last = largest(session.fabric, torch.tensor([-own, own])).tolist()
    if -first != last:
        raise ValueError(
            f"the processes would go on from different updates, {-first} to {last}: the folder of the run "
            f"must be on a disk that all machines share"
        )


# A checkpoint that is continued under other settings is neither the old run nor a new one. How long it trains
# and how often it looks up may change; what decides the numbers may not.
DECISIVE = ("mixer", "model", "data", "optimizer", "seed", "seq_len_from", "seq_len_over")


def _check_same_text(checkpoint: Checkpoint, corpus: Corpus) -> None:
    before = checkpoint.metadata["corpus"]
    if before["sha256"] != corpus.sha256:
        raise ValueError(
            f"{checkpoint.path} was trained on another text than {corpus.name} is now (SHA-256 "
            f"{before['sha256'][:12]}, now {corpus.sha256[:12]}); put the old text back, or start a new run"
        )


def _restore(session: Session, checkpoint: Checkpoint, console: Console) -> None:
    # A setting that did not exist when the checkpoint was written counts as today's default.
    saved = as_stored(settings_from_dict(checkpoint.metadata["settings"]), checkpoint).to_dict()
    now = session.settings.to_dict()
    different = [n for n in DECISIVE if _without_cuts(now[n]) != _without_cuts(saved.get(n))]
    if different:
        changes = ", ".join(f"{n}: {saved.get(n)} in the checkpoint, {now[n]} now" for n in different)
        raise ValueError(f"{checkpoint.path} cannot be resumed with other settings: {changes}")
    parameters = dict(session.model.named_parameters(remove_duplicate=False))
    session.model.load_state_dict(share(checkpoint.tensors["model"], parameters), strict=True)
    restore_optimizer(
        session.optimizer,
        session.model.named_parameters(),
        share(checkpoint.tensors["optimizer"], parameters),
        checkpoint.metadata["optimizer"],
    )
    session.progress = Progress(**checkpoint.metadata["progress"])
    session.begun = checkpoint.metadata.get("begun", {})
    end = checkpoint.metadata["total"]
    if session.settings.optimizer.schedule == "cosine" and end != session.total:
        console.print(
            f"the cosine now ends at update {session.total}, not {end}", style="yellow", markup=False
        )
    console.print(f"resuming from update {session.progress.update} ({checkpoint.path})", markup=False)
    for line in differences(checkpoint.metadata["conditions"], conditions(session.fabric.device)):
        console.print(f"results may differ in their last bits: {line}", style="yellow", markup=False)


# How a batch is cut for memory does not change what it computes, beyond the order of sums.
def _without_cuts(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "micro_batch_size"} if isinstance(value, dict) else value


def _record(session: Session, directory: RunDirectory) -> None:
    text = session.text
    directory.cut_metrics(session.progress.update, key="update")
    directory.write_json(
        {
            "settings": session.settings.to_dict(),
            "parameters": sum(p.numel() for p in session.model.parameters()),
            "begun_from": session.begun or None,
            "corpus": text.corpus.to_dict(),
            "tokenizer": text.tokenizer.kind,
            "vocab_size": text.tokenizer.vocab_size,
            "tokens": text.counts(),
            "updates": session.total,
            "unit": text.unit,
            "unigram_bits": text.unigram_bits,
            "conditions": conditions(session.fabric.device),
            "versions": {name: version(name) for name in ("postil", "torch", "numpy", "lightning-fabric")}
            | {"python": platform.python_version()},
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    )


# ## The sitting
SHORT = {
    "bits per character": "bits/char",
    "bits per byte": "bits/byte",
    "bits per printed value": "bits/value",
}


def _sit(
    session: Session, directory: RunDirectory | None, path: Path, stop: StopRequest, console: Console
) -> Outcome:
    unit = SHORT[session.text.unit]
    kinds = session.settings.trackers if directory is not None else []
    about = {"name": path.name, "settings": session.settings.to_dict(), "update": session.progress.update}
    with (
        closing(open_trackers(kinds, path, **about)) as trackers,
        Display(session.total, unit, console) as display,
    ):
        sitting = Sitting(session, directory, display, stop, trackers)
        reason = sitting.run()
        bits, accuracy = (None if sitting.asked else sitting.finish()) or (None, None)
    if directory is not None:
        try:
            draw_curves(path, session.text.unit)
        except ModuleNotFoundError as error:
            console.print(str(error), style="yellow", markup=False)
    code = stop.exit_code or (128 + sitting.asked if sitting.asked else 0)
    return Outcome(path, reason, session.progress.update, bits, session.text.unit, code, accuracy)
