# mypy: ignore-errors
"""Products of a tile's K blocks: the left operand widened in registers, while wgmmas run.

A unit of work is 64 rows and half a stage of K: four wgmmas. A thread has 16 neighbours along K of
two rows, which lie together in memory and share a scale each: two octets. Octets of the next unit
are widened while a unit's wgmmas run: after the first ``ahead`` of them, and between the others.
"""

from __future__ import annotations

from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from . import ptx, widened_ptx
from .widen import WIDENERS, ue4m3_factors
from .widened_config import Config

__all__ = ["Mainloop"]


class Mainloop:
    def __init__(self, config: Config):
        self.config = config
        self.widener = WIDENERS[config.elements[0]]
        self.fine = config.format.scale.name == "UE4M3"  # a scale for each half of a stage
        self.kept = 4 if self.fine else 3  # registers for the scales of 64 rows

    def allocate(self) -> list:
        """Sums of a thread, a tensor for each step down the rows."""
        config = self.config
        self.next = cute.make_rmem_tensor((16 + self.kept,), Int32)
        self.seen = cute.make_rmem_tensor((2 * config.row_steps,), Int32)
        return [
            cute.make_rmem_tensor((config.batch // 2,), Float32) for _ in range(config.row_steps)
        ]

    def start(self, shared, barriers, wide_barriers, rows, thread) -> None:
        """Addresses of a thread of the warpgroup that has the tile's rows from ``rows`` on.
        ``shared``: tiles and scales of the left operand, and widened tiles of the right one.
        """
        config = self.config
        tiles, scales, wide = shared
        self.full, self.empty = barriers
        self.wide_full, self.wide_empty = wide_barriers
        row, column = rows + thread // 32 * 16 + thread % 32 // 4, thread % 4
        nbytes = config.row_bytes[0]
        if nbytes == 128:  # and half a stage further it is the next 16 bytes
            chunk = (2 * column) ^ (row % 8)
        else:
            chunk = column ^ (row // 2 % 4)
        self.tiles = ptx.pin(tiles + row * nbytes + chunk * 16)
        self.scales = ptx.pin(scales + row * config.scale_row + column * (config.scale_row // 4))
        self.wide = cute.arch.make_warp_uniform(ptx.descriptor(wide))
        self.one = cute.arch.grid_dim()[1]

    @cute.jit
    def __call__(self, sums, blocks, state, advance):
        """Add ``blocks`` K blocks, one at least, to ``sums``; the next state of the pipelines."""
        stage, phase, slot, turn = (cute.arch.make_warp_uniform(each) for each in state)
        self.seen.fill(0)
        cute.arch.mbarrier_wait(self.full + stage, phase)
        scales, words = self.read_scales(stage, 0), self.load(stage, 0, 0)
        octets = [self.octet(words, scales, 0, 0, i) for i in range(4)]
        self.keep(self.fragments(octets, scales), scales)
        for i in range(blocks):
            stage, phase, slot, turn = self.body(
                sums, i + 1 < blocks, (stage, phase, slot, turn), advance
            )
        self.poison(sums)
        return stage, phase, slot, turn

    @cute.jit
    def body(self, sums, more, state, advance):
        """A K block, whose first unit is widened. No wgmma is in flight at its ends."""
        config = self.config
        stage, phase, slot, turn = state
        units = [(half, step) for half in range(2) for step in range(config.row_steps)]
        fragments = [self.next[i] for i in range(16)]
        scales = [[self.next[16 + i] for i in range(self.kept)]]
        scales += [self.read_scales(stage, step) for step in range(1, config.row_steps)]
        cute.arch.mbarrier_wait(self.wide_full + slot, turn)
        for i in range_constexpr(len(units)):
            half, step = units[i]
            if const_expr(i + 1 < len(units)):
                at, row_step = units[i + 1]
                words, following = self.load(stage, at, row_step), scales[row_step]
            for k in range_constexpr(config.ahead):
                self.products(sums[step], slot, half, k, fragments)
            if const_expr(i + 1 == len(units)):
                at, row_step = 0, 0
                cute.arch.sync_warp()
                widened_ptx.arrive_once((self.empty + stage).toint())
                stage, phase = advance(stage, phase, config.stages)
                words, following = self.next_words(stage, phase, more)
            ptx.wait_products(1)  # of the unit before: its registers are free
            octets = []
            for k in range_constexpr(config.ahead, 4):
                octets.append(self.octet(words, following, row_step, at, len(octets)))
                self.products(sums[step], slot, half, k, fragments)
            for j in range_constexpr(len(octets), 4):
                octets.append(self.octet(words, following, row_step, at, j))
            fragments = self.fragments(octets, following)
        ptx.wait_products(0)
        widened_ptx.arrive_once((self.wide_empty + slot).toint())
        slot, turn = advance(slot, turn, config.wide)
        self.keep(fragments, following)
        return stage, phase, slot, turn

    def keep(self, fragments: list, scales: list) -> None:
        """The first unit of the next K block, and its scales."""
        for i, each in enumerate(fragments + scales):
            self.next[i] = each

    @cute.jit
    def next_words(self, stage, phase, more):
        """Of the next stage's first unit, if there is one."""
        words = cute.make_rmem_tensor((4 * self.widener.words,), Int32)
        scales = cute.make_rmem_tensor((self.kept,), Int32)
        words.fill(0)
        scales.fill(0)
        if more:
            cute.arch.mbarrier_wait(self.full + stage, phase)
            for i, each in enumerate(self.load(stage, 0, 0)):
                words[i] = each
            for i, each in enumerate(self.read_scales(stage, 0)):
                scales[i] = each
        return [words[i] for i in range(words.shape[0])], [scales[i] for i in range(self.kept)]

    def load(self, stage, half: int, step: int) -> list:
        """16 elements of one row, then of the other one, eight rows below."""
        nbytes = self.config.row_bytes[0]
        address = self.tiles + stage * (self.config.tile[0] * nbytes)
        if nbytes == 128:
            address, offset = address ^ (16 * half), 0
        else:
            offset = 8 * half
        return [
            word
            for row in (0, 8)
            for word in widened_ptx.load_words(
                address, (64 * step + row) * nbytes + offset, 2 * self.widener.words
            )
        ]

    def read_scales(self, stage, step: int) -> list:
        """Of 64 rows, for a thread's two: a factor for each half of the stage; or one, and a word
        of both scales, and of whether these are left out of the factors."""
        config = self.config
        address = self.scales + stage * config.scale_bytes[0]
        rows = [(64 * step + row) * config.scale_row for row in (0, 8)]
        if self.fine:
            pairs = [widened_ptx.load_small(address, row, 2) for row in rows]
            return [each for pair in pairs for each in ue4m3_factors(pair)]
        low, high = (widened_ptx.load_small(address, row, 1) for row in rows)
        scales = high * 256 + low
        *factors, left_out = self.widener.e8m0_factors(scales, 2)
        return [*factors, left_out * 0x10000 + scales]

    def octet(self, words: list, scales: list, step: int, half: int, i: int) -> list:
        """The ``i``-th octet of a unit, widened; rows take turns."""
        row, count = i % 2, self.widener.words
        own = words[(2 * row + i // 2) * count :][:count]
        self.seen[2 * step + row] = self.widener.marked(self.seen[2 * step + row], own, self.one)
        factor = scales[2 * row + half] if self.fine else scales[row]
        return self.widener.octet(own, factor, self.config.nibbles)

    def fragments(self, octets: list, scales: list) -> list:
        """For each step of 16 columns the registers of a wgmma."""
        pairs = [
            octets[k // 2 * 2 + row][k % 2 * 2 + side]
            for k in range(4)
            for side in (0, 1)
            for row in (0, 1)
        ]
        if self.fine:
            return pairs
        return self.widener.rescaled(pairs, scales[2], 2, scales[2] & 0x10000)

    def products(self, sums, slot, half: int, k: int, fragments: list) -> None:
        """Start the ``k``-th wgmma of a unit."""
        count = self.config.batch // 2
        b = self.wide + (2 * slot + half) * (self.config.tile[1] * 8)
        left = fragments[4 * k : 4 * k + 4]
        ends = k in (self.config.ahead - 1, 3)
        values = widened_ptx.wgmma([sums[i] for i in range(count)], left, b, k, ends)
        for i, value in enumerate(values):
            sums[i] = value

    @cute.jit
    def poison(self, sums):
        """Sums of rows that had a NaN: those of four threads."""
        for i in range_constexpr(2 * self.config.row_steps if self.widener.special else 0):
            seen = self.seen[i]
            for distance in range_constexpr(1, 3):
                seen = seen | cute.arch.shuffle_sync_bfly(seen, distance)
            if seen & 0x80808080 != 0:
                for j in range_constexpr(self.config.batch // 2):
                    if const_expr(j // 2 % 2 == i % 2):
                        sums[i // 2][j] = Float32(float("nan"))
