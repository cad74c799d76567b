"""Peerlane: provision, audit and roll out large language models on multi-GPU hosts."""

__version__ = "0.1.0"
