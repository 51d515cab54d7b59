"""Quantization and products of few rows on a CPU, compiled by numba.

``calls`` takes torch's tensors and ``xla`` takes JAX's arrays; the loops (``encoding``,
``decoding``, ``multiplying``, ...) take numpy's arrays and know no torch.
"""
