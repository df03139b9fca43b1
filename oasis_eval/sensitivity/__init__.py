"""Which part of a model a scheme hurts: parts quantized one at a time, or all but one."""
