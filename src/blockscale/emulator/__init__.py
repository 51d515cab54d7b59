"""Run compiled Hopper and Blackwell kernels on a CPU: PTX text and buffers in, memory out."""

from .alarms.alarm import Alarm
from .alarms.errors import DataRace, EarlyAccess, ExitRace, LaneRace, MissingFence, Uninitialized
from .host.cutedsl import cutedsl
from .host.hostcode import capture
from .isa.system_calls import KernelStopped
from .launches.calls import Call, launch_together
from .launches.device import Device
from .machine.state import Deadlock
from .memory.buffers import MemoryFault
from .memory.tensormap import TensorMap
from .observe.report import Report
from .ptx.program import PtxError

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
    "capture",
    "cutedsl",
    "launch_together",
]
