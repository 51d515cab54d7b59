"""The kernel of a mega MoE: which one there is, and its launches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.common.calls import Alpha, Operand
from ..kernels.common.runtime import gpu_of
from ..kernels.mega.buffers import Buffers, Sizes
from ..kernels.mega.memory import Experts, Launch, Memory
from ..kernels.sm90 import mega_calls as sm90
from ..kernels.sm100 import mega_calls as sm100
from ..tensor import ScaledTensor
from .ranks import PeerError, rank_and_ranks
from .symmetric_memory import symmetric_memory

__all__ = ["MegaLaunch", "memory_of", "why_no_kernel"]

#: By architecture, its calls.
_CALLS: dict[str, Any] = {"sm_90a": sm90, "sm_100a": sm100, "sm_103a": sm100}


def why_no_kernel(sizes: Sizes, weights: str, device: torch.device) -> str:
    """Why there is none; empty where there is one."""
    gpu = gpu_of(device)
    if gpu is None:
        return f"weights are on {device}: the kernel runs on CUDA devices"
    return str(_CALLS.get(gpu.arch, sm100).why_not_mega(sizes, weights, gpu.arch))


#: What modules alike share, as their calls are one after another.
_memories: dict[tuple[Sizes, torch.device, dist.ProcessGroup | None], Memory] = {}


def memory_of(sizes: Sizes, device: torch.device, group: dist.ProcessGroup | None) -> Memory:
    """Of a rank; all ranks ask for the same one after another. It is kept: where one rank forgot it
    and made it anew, the others would not know."""
    if group is None and sizes.ranks > 1:
        group = dist.group.WORLD  # itself, as another one may be initialized later
    key = sizes, device, group
    if key not in _memories:
        buffers = Buffers(sizes)
        memory = symmetric_memory(buffers.nbytes, device, group)
        _memories[key] = Memory(buffers, *memory, rank_and_ranks(group)[0])
    return _memories[key]


class MegaLaunch:
    """The launches of a rank, which holds the memory that it shares with others for them. All ranks
    make it together."""

    def __init__(self, memory: Memory):
        self.memory = memory
        device = memory.buffer.device
        gpu = gpu_of(device)
        assert gpu is not None  # else there is no kernel
        self.calls = _CALLS[gpu.arch]
        # read when the next launch is made: to wait for this one's would take the host's time
        self.missing = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._made_of: Any = None
        self._operands: tuple[Operand, Operand] | None = None

    def __deepcopy__(self, memo: Any) -> MegaLaunch:
        """With the same memory, as another layer alike has it."""
        return MegaLaunch(self.memory)

    def __reduce__(self) -> Any:
        raise TypeError(
            "MegaMoE: its memory cannot be saved; save the state_dict, and make the module anew"
        )

    def __call__(
        self,
        parts: tuple[Tensor, ...],
        experts: tuple[ScaledTensor, ScaledTensor],
        scales: tuple[Tensor | None, Tensor | None],
        weights: Tensor,
        ids: Tensor,
        out: Tensor,
    ) -> Tensor:
        """``out``, of quantized tokens ``parts``; ``scales`` are those of activations. PeerError
        where another rank did not come, at the next call on a GPU."""
        self._check()
        if out.device != self.memory.buffer.device:
            raise ValueError(
                f"MegaMoE: was moved to {out.device}, and its memory is on "
                f"{self.memory.buffer.device}; make it anew where it shall run"
            )
        self.memory.put_tokens(*parts)
        given = self._experts(experts, scales)
        self.calls.mega_moe(self.memory, given, ids, weights, out, Launch())
        if not (out.is_cuda and torch.cuda.is_current_stream_capturing()):
            state = self.memory.region("state", torch.int32).flatten()
            self.missing.copy_(state[1:2], non_blocking=True)
        if not out.is_cuda:
            self._check()
        return out

    def _check(self) -> None:
        if missing := int(self.missing):
            for key in [key for key, each in _memories.items() if each is self.memory]:
                del _memories[key]  # modules that are made anew have other memory
            raise PeerError(
                f"rank {missing - 1} did not come within {Launch().limit:g} s of a launch; what it "
                "left in shared memory cannot be used: make the module anew on all ranks"
            )

    def _experts(
        self,
        experts: tuple[ScaledTensor, ScaledTensor],
        scales: tuple[Tensor | None, Tensor | None],
    ) -> Experts:
        """As the kernel reads them; made once, unless they change, or change unseen."""
        parts = [x for w in experts for x in (w.qdata, w.qscale)]
        versions = [None if x.is_inference() else x._version for x in (*experts, *parts)]
        key = *versions, *((x.data_ptr(), x.shape, x.stride()) for x in parts)
        seen = None not in versions
        if not (seen and self._made_of is not None and self._made_of[0] == key):
            if seen and parts[0].is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "MegaMoE: its weights were not read yet, or have changed; call it once before "
                    "it is captured in a CUDA graph"
                )
            up, down = experts
            self._operands = self.calls.operand_of(up), self.calls.operand_of(down)
            self._made_of = key, parts  # no other tensor gets their memory
        assert self._operands is not None
        alphas = [_alpha(*each) for each in zip(scales, experts, strict=True)]
        return Experts(*self._operands, alphas[0], alphas[1], scales[1])


def _alpha(scale: Tensor | None, w: ScaledTensor) -> Alpha:
    """The factor of a product's accumulators; None where the weights have no global scale."""
    found = w.global_scale
    if found is not None and found.numel() == 1:  # of all experts, whatever its shape
        found = found.reshape(())
    return found if found is None or scale is None else (scale, found)
