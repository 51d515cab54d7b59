"""Run compiled Hopper and Blackwell kernels on a CPU: PTX text and buffers in, memory out."""

from .device import Device, Report
from .machine import Deadlock
from .memory import MemoryFault
from .program import PtxError

__all__ = ["Deadlock", "Device", "MemoryFault", "PtxError", "Report"]
