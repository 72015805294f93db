"""One of several processes: updates one by one, with the hash of all parameters after each."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import safetensors.torch

from postil.registry import build_language_model
from postil.training.data import find_corpus, prepare_text
from postil.training.engine import TIMEOUT, make_fabric, together
from postil.training.loop import Session, start, train_update, validate, write_sample
from postil.training.processes import meeting_point, report, report_error
from postil.training.settings import settings_from_dict
from postil.training.sharding import whole


def session(settings: Any, fabric: Any) -> Session:
    text = prepare_text(settings, find_corpus(settings))
    vocabulary = text.tokenizer.vocab_size
    return start(
        settings, text, fabric, lambda: build_language_model(settings.mixer, settings.model, vocabulary)
    )


def main() -> None:
    runs = [settings_from_dict(each) for each in json.loads(sys.argv[1])]
    fabric, results = make_fabric(runs[0]), []
    with together(runs[0], fabric):
        for settings in runs:
            s = session(settings, fabric)
            hashes, losses = [], []
            for _ in range(settings.updates):
                losses.append(train_update(s)[0].loss)
                tensors = {name: t.detach() for name, t in whole(s.model.state_dict(keep_vars=True)).items()}
                digest = hashlib.sha256()
                for name, tensor in tensors.items():
                    digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
                hashes.append(digest.hexdigest())
            results.append({"hashes": hashes, "losses": losses})
            results[-1] |= {"valid": validate(s).loss, "sample": write_sample(s)}
            if fabric.global_rank == 0:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
                safetensors.torch.save_file(tensors, f"{settings.out}.safetensors")
    report({"runs": results}, meeting_point(TIMEOUT))


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        report_error(error, meeting_point(TIMEOUT))
        raise
