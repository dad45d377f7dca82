"""Speculative-decoding attention for SGLang: see `plugin.py` for the entry point."""

__version__ = "0.1.0"
