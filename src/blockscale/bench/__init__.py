"""Measurements on a GPU: ours and others' side by side, in one run."""
