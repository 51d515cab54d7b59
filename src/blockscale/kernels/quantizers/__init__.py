"""Quantization on a GPU, by kernels written in CuTe DSL: the reference's bytes at memory speed.

``calls`` takes torch's tensors, ``plan`` finds what a call needs, once. Configurations, choosers
and kernels know no torch: ``config`` is how one is chosen, ``kernel`` the quantizer. The way back
is ``dequantize_plan`` and ``dequantize_kernel``.
"""
