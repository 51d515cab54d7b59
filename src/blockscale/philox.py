"""Philox4x32-10: the random bits of an element, by a seed and the element's index.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math

from .arrays import Array, device_of, namespace
from .seed import Numbers, numbers_of

__all__ = ["random_bits"]


def random_bits(seed: int | Numbers, like: Array) -> Array:
    """Uniform 32-bit integers (int64), one an element: Philox4x32-10, whose counter is an element's
    index / 4 and the step, and whose key is the seed's value.

    The same seed gives the same bits on every machine, whatever the layout of the array; those of a
    part of an array are where its elements are in the whole (:class:`blockscale.seed.Seed`).
    """
    xp, shape = namespace(like), tuple(like.shape)
    if isinstance(seed, int):
        seed = numbers_of(seed, shape)
    n, (rows, columns) = math.prod(shape), (1, 1, *shape)[-2:]
    if n == 0:
        return xp.zeros(shape, dtype=xp.int64, device=device_of(like))

    def count(n: int) -> Array:
        return xp.arange(n, dtype=xp.int64, device=device_of(like))

    matrices = count(n // (rows * columns)).reshape((-1, 1)) * seed.matrix
    starts = seed.first + (matrices + count(rows) * seed.row).reshape((-1, 1))
    drawn = _philox(seed, (starts >> 2) + count(columns // 4 + 2))
    return xp.take_along_axis(drawn, (starts & 3) + count(columns), axis=1).reshape(shape)


def _philox(seed: Numbers, counter: Array) -> Array:
    """Four results of each counter (rows, n), one after the other."""
    xp, mask = namespace(counter), 0xFFFFFFFF
    one = xp.ones_like(counter)
    c0, c1 = counter & mask, (counter >> 32) & mask
    c2, c3 = one * (seed.step & mask), one * ((seed.step >> 32) & mask)
    k0, k1 = seed.value & mask, (seed.value >> 32) & mask
    for _ in range(10):
        # int64 products wrap, which leaves their 64 bits as they should be
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (p1 >> 32) & mask ^ c1 ^ k0,
            p1 & mask,
            (p0 >> 32) & mask ^ c3 ^ k1,
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return xp.stack((c0, c1, c2, c3), axis=-1).reshape((counter.shape[0], -1))
