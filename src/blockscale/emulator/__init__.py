"""Run compiled Hopper and Blackwell kernels on a CPU: PTX text and buffers in, memory out."""

from .alarms import Alarm
from .calls import Call, launch_together
from .checks import DataRace, EarlyAccess, ExitRace, LaneRace, MissingFence, Uninitialized
from .cutedsl import cutedsl
from .device import Device
from .isa.system_calls import KernelStopped
from .machine import Deadlock
from .memory import MemoryFault
from .program import PtxError
from .report import Report
from .tensormap import TensorMap

__all__ = [
    "Alarm",
    "Call",
    "DataRace",
    "Deadlock",
    "Device",
    "EarlyAccess",
    "ExitRace",
    "KernelStopped",
    "LaneRace",
    "MemoryFault",
    "MissingFence",
    "PtxError",
    "Report",
    "TensorMap",
    "Uninitialized",
    "cutedsl",
    "launch_together",
]
