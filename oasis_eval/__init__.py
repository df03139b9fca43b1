"""What low-bit quantization does to a language model, measured."""

__version__ = "0.1.0"
