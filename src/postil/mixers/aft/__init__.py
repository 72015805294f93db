r"""The Attention Free Transformer: a family of gated means."""
