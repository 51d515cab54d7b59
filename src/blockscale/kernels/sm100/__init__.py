"""Block-scaled products on Blackwell, by kernels written in CuTe DSL for sm_100a.

``calls`` takes torch's tensors, ``plan`` finds what a call needs, once. Configurations, choosers
and kernels know no torch: ``config`` is how one is chosen, ``kernel`` how it is made, ``kinds``
what the tensor cores multiply. Where the result is quantized, that is ``quantizing``. There was no
such GPU to run them on: they are right in the emulator, and what they reach is not known.
"""
