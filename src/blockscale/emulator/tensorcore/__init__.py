"""Tensor cores: the number formats of their operands and the arithmetic of one MMA."""
