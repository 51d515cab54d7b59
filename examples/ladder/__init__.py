"""The ladder: how an FP8 product gets fast on Hopper, one idea at a time. See docs/ladder.md.

    python -m examples.ladder --sizes 2048,4096 --json ladder.json --plot ladder.png

``steps`` has all kernels in order, ``kernel`` the one that most of them are values of; the others
are configurations of the kernel that ``blockscale.gemm`` uses. ``bench`` measures them.
"""
