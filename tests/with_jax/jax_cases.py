"""Cases that tests of JAX's side have in common."""

from __future__ import annotations

import jax
import pytest

__all__ = ["assert_refused", "of_layouts"]

#: Formats, each with a layout that its scales can have.
of_layouts = pytest.mark.parametrize(("name", "layout"), [
    ("mxfp8", "tcgen05"), ("nvfp4", "tcgen05"), ("mxfp4", "packed"), ("fp8_1x128", "sm90"),
])  # fmt: skip


def assert_refused(call, kind, says):
    """At trace time, under jit, too."""
    with pytest.raises(kind, match=says):
        call()
    with pytest.raises(kind, match=says):
        jax.jit(call)()
