r"""A sitting: the updates of a run, and what happens between them.

Between updates a run shows how it goes, writes it down, asks the validation text, writes a sample and saves.
None of this may change what the updates compute: it only calls what draws from random numbers of its own, and
puts back every mode that it changes.
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from typing import Any

import torch

from postil.training import checkpoints
from postil.training.capture import conditions, optimizer_state
from postil.training.display import Display
from postil.training.engine import largest
from postil.training.evaluation import Score
from postil.training.loop import Progress, Session, Unfinished, train_update, validate, write_sample
from postil.training.run_directory import RunDirectory
from postil.training.sharding import whole
from postil.training.signals import StopRequest
from postil.training.trackers import Trackers

__all__ = ["Sitting"]


class Sitting:
    r"""One stretch of a run: `run` until something ends it, then `finish`.

    Only the process with the run's folder has a `directory`; all must make the same calls.
    """

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
        self.evaluate_every, self.sample_every = session.evaluate_every, session.sample_every
        self.save_every = s.save_every or self.evaluate_every
        self.began = time.monotonic()
        self.before = session.progress.seconds
        self.first_tokens = session.progress.tokens
        self.last_tokens = None if session.total is None else s.tokens_after(session.total)
        self.recent = Score()
        self.first = self.saved = session.progress.update
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
            score, norm = self._update()
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

    def finish(self) -> tuple[float, float] | None:
        r"""Score the whole validation text at the end; return its bits per unit and its accuracy."""
        try:
            progress, score = self.session.progress, self._validate(None)
        except Unfinished:
            return None
        bits = score.bits(self.session.text.tokens_per_unit)
        self.display.evaluation(progress.update, score.loss, bits, score.accuracy, best=False)
        self._log(_line("final", progress, score, bits))
        return bits, score.accuracy

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

    # The first update compiles, for longer than a scheduler waits and in calls that ask nobody. There is
    # nothing new to save yet, so the signal may strike.
    def _update(self) -> tuple[Score, float]:
        if self.session.settings.compile and self.session.progress.update == self.first:
            with self.stop.at_once():
                return train_update(self.session)
        return train_update(self.session)

    # So does the first evaluation. It changes nothing, so it can be broken off anywhere; but not by one of
    # several processes, where the others would wait for it at the next batch.
    def _validate(self, limit: int | None) -> Score:
        if not self.session.settings.compile or self.session.fabric.world_size > 1:
            return validate(self.session, limit, lambda: self.stop.pressing)
        try:
            with self.stop.at_once():
                return validate(self.session, limit)
        except SystemExit:
            if not self.stop:
                raise
            raise Unfinished from None

    def _show(self, score: Score) -> None:
        progress, bits = self.session.progress, score.bits(self.session.text.tokens_per_unit)
        elapsed = time.monotonic() - self.began
        speed = (progress.tokens - self.first_tokens) / max(elapsed, 1e-9)
        remaining = []
        if self.last_tokens is not None:
            remaining.append((self.last_tokens - progress.tokens) / max(speed, 1e-9))
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
            score = self._validate(self.session.settings.evaluate_windows)
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
                "begun": session.begun,
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
