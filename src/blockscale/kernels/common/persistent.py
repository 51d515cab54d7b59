# mypy: ignore-errors
"""What kernels do whose CTAs stay, and pass stages of a pipeline to each other."""

from __future__ import annotations

from cutlass import Int32, const_expr, cute

__all__ = ["advance_pipeline", "cluster_id_and_count", "cluster_shape", "cluster_sync"]


def advance_pipeline(stage, phase, stages: int):
    """The next of ``stages`` in a ring, and the parity of its barriers."""
    stage = stage + 1
    wrapped = Int32(stage == stages)
    return stage - wrapped * stages, phase ^ wrapped


def cluster_id_and_count(ctas: int):
    """This cluster, of ``ctas`` CTAs, and how many there are."""
    return cute.arch.block_idx()[0] // ctas, cute.arch.grid_dim()[0] // ctas


def cluster_shape(ctas: int):
    """Of a launch. CTAs that are alone get none: neighbours are then the two of a TPC, whose loads
    of the same bytes become one. As clusters of one they would be spread over TPCs."""
    return (ctas, 1, 1) if ctas > 1 else None


@cute.jit
def cluster_sync(ctas: int):
    """All threads of a cluster that use a barrier have seen it."""
    if const_expr(ctas > 1):
        cute.arch.cluster_arrive_relaxed()  # barriers have their own fence
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
