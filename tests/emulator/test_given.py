"""What a launch is given, and cannot take: each error names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import text

from blockscale import emulator as em

STORE = "st.global.u32 [%at], %t;"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("seed", -1),
        ("seed", 1.0),
        ("resident", 1.5),
        ("resident", 0),
        ("workers", 0),
        ("workers", 1.5),
        ("seed", True),
    ],
)
def test_settings(name: str, given: Any) -> None:
    wanted = ValueError if isinstance(given, int) and given is not True else TypeError
    with pytest.raises(wanted, match=f"{name}: got {given}"):
        em.Device(**{name: given})


def test_ptx_that_is_no_text() -> None:
    device, given = em.Device(), text("").encode()
    with pytest.raises(TypeError, match="ptx: got bytes; expected the text of a module"):
        device.launch(given, "k", 1, 1, [np.zeros(1)])  # type: ignore[arg-type]
    right = em.Call(device, text(""), "k", 1, 1, [np.zeros(1)])
    wrong = em.Call(em.Device(), given, "k", 1, 1, [np.zeros(1)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"calls\[1\].ptx: got bytes"):
        em.launch_together([right, wrong])


def test_views_whose_memory_holds_something_else() -> None:
    torch = pytest.importorskip("torch")
    values = torch.zeros(64, dtype=torch.complex64)
    for view, name in ((values.conj(), "conj"), (values.conj().imag, "neg")):
        view = view if view.is_contiguous() else torch._neg_view(torch.zeros(64))
        with pytest.raises(ValueError, match=rf"args\[0\]: .*resolve_{name}"):
            em.Device().launch(text(STORE), "k", 1, 32, [view])


def test_a_read_only_view_of_what_may_be_written() -> None:
    """The pointer of a GPU knows of no view: what one argument may write may be written."""
    out = np.zeros(64, np.uint32)
    view = out[16:48]
    view.flags.writeable = False
    body = text("ld.param.u64 %rd1, [b];" + STORE, ".param .u64 b")
    for args in ([out, view], [out, out], [out[:], view]):
        out[:] = 0
        em.Device().launch(body, "k", 1, 64, args)
        assert (out == np.arange(64)).all()
    same = out[:]
    same.flags.writeable = False
    em.Device().launch(body, "k", 1, 64, [out, same])


def test_what_only_a_read_only_view_has_stays_so() -> None:
    base = np.zeros(64, np.uint32)
    view = base[16:]
    view.flags.writeable = False
    body = text("ld.param.u64 %rd1, [b];" + STORE, ".param .u64 b")
    em.Device().launch(body, "k", 1, 32, [base[:32], view])
    assert (base[:32] == np.arange(32)).all()
    with pytest.raises(em.PtxError, match="which is read-only"):
        em.Device().launch(body, "k", 1, 64, [base[:32], view])
    device = em.Device(on_error="collect")
    report = device.launch(body, "k", 1, 64, [base[:32], view])
    assert [alarm.kind for alarm in report.alarms] == ["bounds"]
    assert not base[32:].any()


def test_a_key_twice_in_a_suppression() -> None:
    with pytest.raises(ValueError, match="line 2 has line= twice, '3' and '4'"):
        em.Device(suppress=["# alarms", "race line=3 line=4  # both write the same"])
