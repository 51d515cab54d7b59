"""Unfinished runs of ranks: each writes its shards, any number of ranks reads them.

A run that is saved is a folder, which has its name only when all ranks have written; the one before
it is removed after that. So one that is whole is there at any time, whoever is killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .saves import Saves, State, unreadable
from .tensor_plan import by_kind, by_rank, reordered

if TYPE_CHECKING:
    from .ranks import ShardedRanks

__all__ = ["ShardedSaves"]

_REST = "run.pt"  # what is no shard


@dataclass(frozen=True)
class ShardedSaves:
    """Of one run. ``file``: where it is when it is finished, as that of one process."""

    file: Saves
    ranks: ShardedRanks

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State | None:
        newest = max(self._saved, default=None)
        finished, folder = self.ranks.told((self.file.path.exists(), newest))
        if finished:
            return self.file.read()
        if folder is None:
            return None
        state = self._state(model, optimizer)
        try:
            load(state, checkpoint_id=folder)
            found: State = torch.load(folder / _REST, weights_only=True)
        except (Exception, CheckpointException) as error:
            raise unreadable(folder, error) from None
        state = self._in_order(state, by_rank)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return found

    def write(self, rest: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        part, older = self.file.path.with_suffix(".writing"), self._saved
        if self.ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # of ranks that were killed
        self.ranks.told(None)  # nobody writes before
        try:
            save(self._state(model, optimizer), checkpoint_id=part)  # waits for all ranks
        except CheckpointException as error:
            failed = ", ".join(f"rank {rank}: {why}" for rank, (why, _) in error.failures.items())
            raise OSError(f"out: cannot write {part} ({failed}); make room, then resume") from None
        if self.ranks.rank == 0:
            torch.save(rest, part / _REST)
            os.rename(part, self.file.path.with_suffix(f".step{rest['step']:09}"))
            _remove(older)
        self.ranks.told(None)  # nobody stops before

    def finish(self, rest: State) -> None:
        if self.ranks.rank == 0:
            self.file.finish(rest)
            _remove(self._saved)

    @property
    def _saved(self) -> list[Path]:
        return list(self.file.path.parent.glob(f"{self.file.path.stem}.step*"))

    def _state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """As any ranks have it."""
        states = get_state_dict(model, optimizer)
        return self._in_order(dict(zip(("model", "optimizer"), states, strict=True)), by_kind)

    def _in_order(self, state: State, order: Callable[[Tensor, int], Tensor]) -> State:
        ranks = self.ranks.tensor.size()
        return state if ranks == 1 else reordered(state, order, ranks)


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
