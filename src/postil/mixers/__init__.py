r"""Mixers, one equation a file."""
