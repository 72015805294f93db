r"""A training run from its settings to its folder.

A run leaves a folder behind that explains itself: `run.json` says what was trained on what, with which
versions; `metrics.jsonl` how it went; `checkpoints/` holds the model; `loss.svg` shows the curve. Started
again with `resume`, it goes on as if it had never stopped.
"""

from __future__ import annotations

import platform
import signal
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
from postil.registry import build_language_model
from postil.text import Corpus, tokenizer_from_dict
from postil.training import checkpoints
from postil.training.capture import conditions, differences, optimizer_state, restore_optimizer
from postil.training.checkpoints import Checkpoint
from postil.training.curves import draw_curves
from postil.training.data import TrainingText, find_corpus, prepare_text
from postil.training.display import Display
from postil.training.engine import as_launched, largest, make_fabric, together
from postil.training.evaluation import Score
from postil.training.loop import Progress, Session, Unfinished, start, train_update, validate, write_sample
from postil.training.processes import is_rank
from postil.training.ranks import train_in_ranks
from postil.training.run_directory import RunDirectory, RunDirectoryError
from postil.training.settings import TrainSettings
from postil.training.sharding import share, whole
from postil.training.signals import StopRequest, stopping_gracefully
from postil.training.trackers import Trackers, open_trackers

__all__ = ["Outcome", "train"]


@dataclass(frozen=True)
class Outcome:
    r"""How a sitting ended: why, after which update, and with which validation loss in bits."""

    path: Path
    reason: str
    update: int
    bits: float | None
    unit: str
    exit_code: int = 0

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
    # A default that was found is a choice from here on: a resumed run must not find another.
    settings.text = settings.text or text.corpus.name
    _announce(text, console)
    session = start(
        settings,
        text,
        fabric,
        lambda: build_language_model(settings.mixer, settings.model, text.tokenizer.vocab_size),
    )
    if checkpoint is not None:
        _restore(session, checkpoint, console)
    _check_same_start(session)
    return session


# A folder that only one of several machines can see would let the others begin anew, beside it.
def _check_same_start(session: Session) -> None:
    own = session.progress.update
    first, last = largest(session.fabric, torch.tensor([-own, own])).tolist()
    if -first != last:
        raise ValueError(
            f"the processes would go on from different updates, {-first} to {last}: the folder of the run "
            f"must be on a disk that all machines share"
        )


def _announce(text: TrainingText, console: Console) -> None:
    if text.corpus.note:
        console.print(text.corpus.note, style="yellow", markup=False)
    if text.unseen:
        shown = ", ".join(f"{symbol} {count} times" for symbol, count in list(text.unseen.items())[:10])
        console.print(
            f"the validation text has {len(text.unseen)} symbols that training never shows: {shown}",
            style="yellow",
            markup=False,
        )


# A checkpoint that is continued under other settings is neither the old run nor a new one. How long it trains
# and how often it looks up may change; what decides the numbers may not.
DECISIVE = ("mixer", "model", "data", "optimizer", "seed")


def _check_same_text(checkpoint: Checkpoint, corpus: Corpus) -> None:
    before = checkpoint.metadata["corpus"]
    if before["sha256"] != corpus.sha256:
        raise ValueError(
            f"{checkpoint.path} was trained on another text than {corpus.name} is now (SHA-256 "
            f"{before['sha256'][:12]}, now {corpus.sha256[:12]}); put the old text back, or start a new run"
        )


def _restore(session: Session, checkpoint: Checkpoint, console: Console) -> None:
    saved, now = checkpoint.metadata["settings"], session.settings.to_dict()
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
            "corpus": text.corpus.to_dict(),
            "tokenizer": text.tokenizer.kind,
            "vocab_size": text.tokenizer.vocab_size,
            "tokens": {"training": len(text.training_tokens), "validation": len(text.validation_tokens)},
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
def _sit(
    session: Session, directory: RunDirectory | None, path: Path, stop: StopRequest, console: Console
) -> Outcome:
    unit = {"bits per character": "bits/char", "bits per byte": "bits/byte"}[session.text.unit]
    kinds = session.settings.trackers if directory is not None else []
    about = {"name": path.name, "settings": session.settings.to_dict(), "update": session.progress.update}
    with (
        closing(open_trackers(kinds, path, **about)) as trackers,
        Display(session.total, unit, console) as display,
    ):
        sitting = _Sitting(session, directory, display, stop, trackers)
        reason = sitting.run()
        bits = None if sitting.asked else sitting.finish()
    if directory is not None:
        try:
            draw_curves(path, session.text.unit)
        except ModuleNotFoundError as error:
            console.print(str(error), style="yellow", markup=False)
    code = stop.exit_code or (128 + sitting.asked if sitting.asked else 0)
    return Outcome(path, reason, session.progress.update, bits, session.text.unit, code)


class _Sitting:
    r"""The loop over updates, and what happens between them."""

    def __init__(
        self,
        session: Session,
        directory: RunDirectory | None,
        display: Display,
        stop: StopRequest,
        trackers: Trackers,
    ):
        self.session, self.directory, self.display, self.stop = session, directory, display, stop
        self.trackers = trackers
        s = session.settings
        epoch = session.text.updates_per_epoch
        self.evaluate_every = s.evaluate_every or max(1, min(500, epoch // 10))
        self.sample_every = self.evaluate_every if s.sample_every is None else s.sample_every
        self.save_every = s.save_every or self.evaluate_every
        self.began = time.monotonic()
        self.before = session.progress.seconds
        self.first_tokens = session.progress.tokens
        self.recent = Score()
        self.saved = session.progress.update
        self.asked: signal.Signals | None = None

    def run(self) -> str:
        r"""Train until something ends it; return what it was."""
        s, progress = self.session.settings, self.session.progress
        while True:
            reason = self._reason_to_end()
            if reason is not None:
                # What was trained since the last checkpoint would be lost otherwise.
                if progress.update > self.saved:
                    self._save(best=False)
                return reason
            score, norm = train_update(self.session)
            progress.seconds = self.before + time.monotonic() - self.began
            self.recent += score
            self._show(score)
            if progress.update % s.log_every == 0:
                self._log_training(norm)
            best = False
            if progress.update % self.evaluate_every == 0:
                best = self._evaluate()
            if self.sample_every and progress.update % self.sample_every == 0:
                self.display.sample(s.prompt, write_sample(self.session))
            if progress.update % self.save_every == 0 or best:
                self._save(best)

    def finish(self) -> float | None:
        r"""Score the whole validation text at the end; return its bits per character or byte."""
        try:
            progress, score = self.session.progress, validate(self.session, None, lambda: self.stop.pressing)
        except Unfinished:
            return None
        bits = score.bits(self.session.text.tokens_per_unit)
        self.display.evaluation(progress.update, score.loss, bits, score.accuracy, best=False)
        self._log(_line("final", progress, score, bits))
        return bits

    # A signal reaches one process before another, and clocks differ. If one left at update 20 and another
    # went on to 21, that one would wait for ever: so they ask each other before every update.
    def _reason_to_end(self) -> str | None:
        s, progress = self.session.settings, self.session.progress
        late = s.max_time is not None and time.monotonic() - self.began >= s.max_time
        own = torch.tensor([int(self.stop.signal or 0), int(late)])
        number, late = largest(self.session.fabric, own).tolist()
        if number:
            self.asked = signal.Signals(number)
            return f"asked to stop by {self.asked.name}"
        if self.session.total is not None and progress.update >= self.session.total:
            return "all updates made"
        return "the time is up" if late else None

    def _show(self, score: Score) -> None:
        progress, bits = self.session.progress, score.bits(self.session.text.tokens_per_unit)
        elapsed = time.monotonic() - self.began
        speed = (progress.tokens - self.first_tokens) / max(elapsed, 1e-9)
        remaining = []
        if self.session.total is not None:
            per_update = self.session.settings.tokens_per_update / max(speed, 1e-9)
            remaining.append((self.session.total - progress.update) * per_update)
        if self.session.settings.max_time is not None:
            remaining.append(max(0.0, self.session.settings.max_time - elapsed))
        share_of_best = self.session.utilisation(speed)
        self.display.update(
            progress.update, score.loss, bits, speed, share_of_best, min(remaining, default=None)
        )

    # The mean over all updates since the last line, not the loss of the one that happens to be logged.
    def _log_training(self, norm: float) -> None:
        progress = self.session.progress
        bits = self.recent.bits(self.session.text.tokens_per_unit)
        rate = self.session.schedule(progress.update)
        self._log(_line("train", progress, self.recent, bits, lr=rate, gradient_norm=norm))
        self.recent = Score()

    def _evaluate(self) -> bool:
        progress = self.session.progress
        try:
            limit = self.session.settings.evaluate_windows
            score = validate(self.session, limit, lambda: self.stop.pressing)
        except Unfinished:
            return False
        bits = score.bits(self.session.text.tokens_per_unit)
        best = progress.best is None or bits < progress.best
        if best:
            progress.best = bits
        self.display.evaluation(progress.update, score.loss, bits, score.accuracy, best)
        self._log(_line("valid", progress, score, bits))
        return best

    def _save(self, best: bool) -> None:
        session = self.session
        self.saved = session.progress.update
        optimizer, values = optimizer_state(session.optimizer, session.model.named_parameters())
        # Whole tensors come together in the process that writes; all others take part, and then wait for it
        # however long it takes.
        keep = self.directory is not None
        tensors = {
            "model": whole(session.model.state_dict(keep_vars=True), keep),
            "optimizer": whole(optimizer, keep),
        }
        with session.fabric.rank_zero_first():
            if self.directory is not None:
                self._write(self.directory, tensors, values, best)

    def _write(
        self, directory: RunDirectory, tensors: dict[str, Any], optimizer: dict[str, Any], best: bool
    ) -> None:
        session = self.session
        checkpoints.save(
            directory.checkpoints,
            session.progress.update,
            tensors,
            {
                "settings": session.settings.to_dict(),
                "tokenizer": session.text.tokenizer.to_dict(),
                "corpus": session.text.corpus.to_dict(),
                "unit": session.text.unit,
                "total": session.total,
                "optimizer": optimizer,
                "progress": asdict(session.progress),
                "conditions": conditions(session.fabric.device),
            },
            keep=session.settings.keep,
            best=best,
        )

    def _log(self, line: dict[str, Any]) -> None:
        if self.directory is not None:
            self.directory.log(line)
        self.trackers.log(line)


def _line(kind: str, progress: Progress, score: Score, bits: float, **more: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "update": progress.update,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 3),
        "loss": score.loss,
        "bits": bits,
        "accuracy": score.accuracy,
        **more,
    }
