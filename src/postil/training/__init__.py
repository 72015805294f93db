r"""Training: settings, the loop, checkpoints, and the folder a run leaves behind."""
