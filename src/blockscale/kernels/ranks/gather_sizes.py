"""What lies where in the memory in which ranks bring the shards of a matrix together: a pure
function of sizes. Matrices of other sizes are brought together in the same memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ARRIVED",
    "CHUNK_ROWS",
    "EPOCH",
    "FINISHED",
    "MISSING",
    "MOST_CHUNKS",
    "READY",
    "WORDS",
    "GatherSizes",
    "why_not_gather",
]

CHUNK_ROWS = 64  # that a counter tells of
MOST_CHUNKS = 4096  # of all ranks
_MOST_RANKS = 128

# Words of 4 bytes: launches that are over; 1 + the rank that is missing; warps of this launch that
# are done; of each rank, launches that have begun; of each chunk, blocks that are here, in one set
# of counters for every other launch, which clears the other one.
EPOCH, MISSING, FINISHED, READY, ARRIVED = 0, 1, 2, 32, 32 + _MOST_RANKS
WORDS = ARRIVED + 2 * MOST_CHUNKS


@dataclass(frozen=True, slots=True)
class GatherSizes:
    """Of fp8_1x128: rows of E4M3, and an fp32 scale for each 128 of their elements.

    >>> GatherSizes(2, 2048, 7168).nbytes >> 20
    30

    Attributes:
        ranks: how many there are.
        rows: of a shard.
        columns: of the matrix, K.
    """

    ranks: int
    rows: int
    columns: int

    @property
    def whole_rows(self) -> int:
        return self.ranks * self.rows

    @property
    def k_blocks(self) -> int:
        return self.columns // 128

    @staticmethod
    def nan() -> slice:
        """Bytes before scales that are NaN, whatever the sizes."""
        return slice(4 * WORDS, 4 * WORDS + 4 * MOST_CHUNKS * CHUNK_ROWS)

    @property
    def scale(self) -> slice:
        """Bytes of (1 + K / 128, ranks * rows) fp32: a row of NaN, then scales."""
        row = 4 * self.whole_rows
        return slice(self.nan().stop - row, self.nan().stop + self.k_blocks * row)

    @property
    def data(self) -> slice:
        """Bytes of rows (ranks * rows, K)."""
        return slice(self.scale.stop, self.scale.stop + self.whole_rows * self.columns)

    @property
    def nbytes(self) -> int:
        return self.data.stop


def why_not_gather(sizes: GatherSizes) -> str:
    """Why no kernel takes them; empty where one may."""
    if not 2 <= sizes.ranks <= _MOST_RANKS:
        return f"{sizes.ranks} ranks: kernels bring the shards of 2 to {_MOST_RANKS} together"
    if sizes.rows % CHUNK_ROWS or not sizes.rows:
        return f"{sizes.rows} rows of a shard: kernels that gather take multiples of {CHUNK_ROWS}"
    if sizes.whole_rows > MOST_CHUNKS * CHUNK_ROWS:
        most = MOST_CHUNKS * CHUNK_ROWS
        return f"{sizes.whole_rows} rows of all ranks: kernels that gather take {most}"
    if sizes.columns % 128 or not sizes.columns:
        return f"K = {sizes.columns}: kernels that gather take multiples of 128"
    return ""
