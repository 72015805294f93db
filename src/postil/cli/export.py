r"""`postil export`: a trained model in the form of others."""

from __future__ import annotations

import argparse
from pathlib import Path

from postil.training.saved import load_run

__all__ = ["run"]


def run(argv: list[str]) -> int:
    r"""Write a model for the Hugging Face Hub, for ONNX, or for `torch.export`."""
    parser = argparse.ArgumentParser(prog="postil export", description="Write a trained model for others.")
    parser.add_argument("run", help="folder of a run, or of one checkpoint")
    parser.add_argument("--to", required=True, choices=("huggingface", "onnx", "torch"), help="the form")
    parser.add_argument("--out", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--checkpoint", default="auto", help="auto (latest), best, or a checkpoint's name")
    arguments = parser.parse_args(argv)
    saved = load_run(arguments.run, arguments.checkpoint)
    out: Path = arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is not an empty folder; give another")
    if arguments.to == "huggingface":
        from postil.integrations.huggingface import PretrainedModel

        PretrainedModel.of(saved).save_pretrained(out)
        print(f"{out}: for PretrainedModel.from_pretrained and, with transformers, AutoModelForCausalLM")
        return 0
    from postil.integrations.export import export_model

    described = export_model(saved, out, arguments.to)
    for name in ("prefill", "step"):
        graph = described[name]
        shapes = ", ".join(f"{key} {list(shape)}" for key, shape in graph["inputs"].items())
        print(f"{out / graph['file']}: {shapes}")
    return 0
