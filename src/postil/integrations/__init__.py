r"""Bridges to libraries that people already use; each optional."""
