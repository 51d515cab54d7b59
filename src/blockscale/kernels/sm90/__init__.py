"""Block-scaled products on Hopper, by kernels written in CuTe DSL for sm_90a.

``calls`` takes torch's tensors, ``plan`` finds what a call needs, once. Configurations, choosers
and kernels know no torch: ``config`` is how one is chosen, ``kernel`` how it is made.
"""
