"""What processes that a comparison starts have in common: they stop and end when it says so."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait
from typing import NoReturn

import torch

__all__ = ["become_worker", "leave"]


def become_worker() -> None:
    """Of one thread, which a CPU's losses then depend on; deaf to signals that stop the parent, who
    says so; at its end when the parent is."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def leave() -> NoReturn:
    """End a rank without the interpreter's own end, which now and then meets a thread of gloo that
    gives a tensor back, and aborts (torch 2.13)."""
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
