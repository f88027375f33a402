"""GRPO for language models in low precision, on PyTorch Lightning."""

__version__ = "0.1.0"
