"""What is said where there is no kernel."""

__all__ = ["FallbackWarning"]


class FallbackWarning(UserWarning):
    """An operation on a GPU has no kernel for its arguments: plain torch, or XLA, runs, and is
    slower."""
