"""What quantization does to each tensor of a model in training, by layer and step."""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..nn import observing
from ..nn.observing import Form, Made
from ..nn.recipe import Recipe
from ..watching import is_faked, is_transformed
from .form_kernels import FormKernels
from .form_lines import Lines, lines_of
from .form_numbers import Measured, evaluate
from .form_samples import Sample, take_sample, values_of
from .module_calls import Calls, hook_modules
from .watch_data import NOTHING_SEEN
from .watch_report import write_watch_report

__all__ = ["NonfiniteWarning", "WatchFiles", "watch"]

_BATCH = 128  # samples whose numbers are computed together


class NonfiniteWarning(UserWarning):
    """A tensor of a watched step has NaN or infinities."""


class WatchFiles(NamedTuple):
    """Where what was seen is written: lines of JSON after each watched step, a page at the end."""

    jsonl: Path
    html: Path


@contextmanager
def watch(
    model: nn.Module, every: int = 1, out: str | os.PathLike[str] = "."
) -> Iterator[WatchFiles]:
    """Look at what converted layers quantize, in one step out of ``every``.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), bs.Recipe("mxfp8"))
    >>> with bs.debug.watch(model, every=100, out="seen") as files:
    ...     for x in batches:
    ...         model(x).square().mean().backward()
    >>> files.html.name
    'watch.html'

    A step is a forward of ``model`` with gradients and the backward that follows, so each
    micro-batch is one; forwards before a backward belong to its step. Numbers are of the elements
    and scales that the layers' own quantizers have made, and change nothing. After each watched
    step a line for each tensor and the product that reads it is written to ``watch.jsonl``, and at
    the end, whatever ends the block, one page of pictures, ``watch.html`` (docs/reference/debug.md
    has the keys); a UserWarning says so where no step was seen. A tensor with NaN or infinities is
    named by a :class:`NonfiniteWarning` after its step. Compiled code runs as it is written in a
    watched step; watch the module that torch.compile returned, not the one that it was given, whose
    calls nobody sees. Of ranks each writes files of its own, with ``-rank0`` in their names.

    Args:
        every: steps 0, ``every``, 2 ``every``, ... are watched; others cost nothing.
        out: a folder, which is made. What is there stays: the second files are ``watch-2.jsonl``
            and ``watch-2.html``.

    Raises ValueError where ``model`` has no converted layer or ``every`` is no positive integer,
    RuntimeError where another watch is open.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every: got {every!r}; expected a positive integer, 1 for each step")
    if not any(isinstance(getattr(m, "recipe", None), Recipe) for m in model.modules()):
        raise ValueError(
            "model: has no converted layer, nothing is quantized; call "
            "blockscale.convert(model, recipe) before"
        )
    if not _open.acquire(blocking=False):
        raise RuntimeError(
            "watch: another watch is open; close it before, or watch a module that has both models"
        )
    try:
        files = _new_files(Path(out))
        with files.jsonl.open("a", encoding="utf-8") as file:

            def write(lines: Sequence[str]) -> None:
                file.writelines(lines)
                file.flush()  # a run that is killed leaves them

            watcher = _Watcher(model, every, write)
            try:
                with watcher.hooked():
                    yield files
            finally:
                watcher.end()
                write_watch_report(files.jsonl, files.html)
            if not files.jsonl.stat().st_size:
                warnings.warn(f"watch: {NOTHING_SEEN}", stacklevel=3)
    finally:
        _open.release()


_open = threading.Lock()
_modes = torch._C._len_torch_dispatch_stack


def _new_files(folder: Path) -> WatchFiles:
    """Files that nobody has: the first of these is made."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"-rank{torch.distributed.get_rank()}" if _is_ranked() else ""
    number = 1
    while True:
        name = f"watch{rank}" + (f"-{number}" if number > 1 else "")
        files = WatchFiles(folder / f"{name}.jsonl", folder / f"{name}.html")
        if not files.html.exists():
            try:
                files.jsonl.touch(exist_ok=False)
                return files
            except FileExistsError:
                pass
        number += 1


#: Of a line: module, tensor and product.
_Key = tuple[str, str, str]


class _Watcher:
    """Counts steps, and looks at some. Hooks of modules say whose tensors are seen."""

    def __init__(
        self, model: nn.Module, every: int, write: Callable[[Sequence[str]], None]
    ) -> None:
        self.model, self.every, self.write = model, every, write
        self.step, self.backward_began = -1, True
        self.seen: _Seen | None = None  # of a watched step that is not over
        self._calls, self._kernels = Calls(), FormKernels()
        self._closing: list[Callable[[], Any]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Steps begin where the model is called."""
        model = self.model
        compiled = getattr(model, "_compiled_call_impl", None)
        if compiled is not None:  # hooks would be compiled, too

            def call(*args: Any, **kwargs: Any) -> Any:
                self._before(model, args)
                output = None
                try:
                    output = compiled(*args, **kwargs)
                finally:
                    self._after(model, args, output)
                return output

            model._compiled_call_impl = call
        else:
            hooks = (
                model.register_forward_pre_hook(self._before, prepend=True),
                model.register_forward_hook(self._after, always_call=True),
            )
        try:
            yield
        finally:
            if compiled is not None:
                model._compiled_call_impl = compiled
            else:
                for hook in hooks:
                    hook.remove()

    def _before(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # of a function that calls the model: nobody sees it
            return
        trains = torch.is_grad_enabled() and not is_transformed()
        if trains and self.backward_began and not _in_backward():
            self.end()
            self.step, self.backward_began = self.step + 1, False
            if self.step % self.every == 0:
                self._begin()
        if self.seen is not None:
            self._calls.enter("")
            self._calls.trains = trains

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.seen is not None:
            self._calls.leave()
            self._calls.trains = True
        if self.backward_began or _in_backward() or not torch.is_grad_enabled():
            return
        found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        for x in found:
            x.register_hook(partial(self._backward_begins, self.step))
        if output is not None and not found:
            self.backward_began = True  # nobody tells: the next forward begins a step

    def _backward_begins(self, step: int, grad: Tensor) -> None:
        if step != self.step or self.backward_began:
            return
        self.backward_began = True
        if self.seen is not None:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def _begin(self) -> None:
        self.seen = _Seen(self._kernels)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stance = torch.compiler.set_stance("force_eager")
            self._closing.append(partial(stance.__exit__, None, None, None))
        self._closing.append(hook_modules(self.model, self._calls))
        observing.observer = self

    def saw(self, place: tuple[Any, str], role: str, x: Any, forms: dict[str, Form]) -> None:
        name, part = place
        if name is None:  # a model that is not watched, beside this one
            return
        if self.seen is None or not self._calls.trains or is_faked() or is_transformed():
            return
        if part:
            name = f"{name}.{part}" if name else part
        if not (_modes() or torch.is_grad_enabled()):  # as in most layers
            self.seen.add(name, role, x, forms)
            return
        apart = _disable_current_modes() if _modes() else nullcontext()  # they keep what is made
        with torch.no_grad(), apart:
            self.seen.add(name, role, x, forms)

    def end(self) -> None:
        """End the step: if it is watched, write what was seen."""
        if self.seen is None:
            return
        seen, self.seen, observing.observer = self.seen, None, None
        for close in self._closing:
            close()
        self._closing.clear()
        about: dict[str, int] = {"step": self.step}
        if _is_ranked():
            about["rank"] = torch.distributed.get_rank()
        with torch.no_grad():
            lines, nonfinite = seen.lines(json.dumps(about)[:-1])
        self.write(lines)
        _warn(self.step, [json.loads(lines[i]) for i in nonfinite])


class _Seen:
    """Holds what was seen in a step, in the order of first calls."""

    def __init__(self, kernels: FormKernels) -> None:
        self._of: dict[_Key, list[int]] = {}  # numbers of forms
        self._in_forward: set[_Key] = set()
        self._count = 0
        self._kernels = kernels
        self._waiting: list[tuple[int, Sample]] = []
        self._measured: dict[int, Measured] = {}
        self._lock = threading.Lock()

    def add(self, name: str, role: str, x: Any, forms: dict[str, Form]) -> None:
        with self._lock:  # autograd has a thread for each device, and torch.nn.DataParallel too
            self._add(name, role, x, forms)

    def _add(self, name: str, role: str, x: Any, forms: dict[str, Form]) -> None:
        backward, new = _in_backward(), []
        for product, form in forms.items():
            key = name, role, product
            if not backward:
                self._in_forward.add(key)
            elif key in self._in_forward:  # checkpoints compute it again
                continue
            new.append((key, form))
        if not new:
            return
        values = values_of(x)
        of_rows = values is not None and not isinstance(values, Tensor)
        left: list[tuple[int, Any, Form]] = []
        for key, form in new:
            number, self._count = self._count, self._count + 1
            self._of.setdefault(key, []).append(number)
            known = None if isinstance(form, Made) and form.is_transformed else values
            if of_rows or not self._kernels.add(number, known, form):
                left.append((number, known, form))
        if left:
            self._sample(left)

    def _sample(self, forms: list[tuple[int, Any, Form]]) -> None:
        """Forms of one tensor that no kernel looks at, and what has its values."""
        limits = None
        for number, values, form in forms:
            matrix = values if isinstance(values, Tensor) else getattr(values, "x", None)
            if limits is None and matrix is not None and matrix.numel():
                low, high = torch.aminmax(matrix)
                limits = low, high
            q = form.tensor() if isinstance(form, Made) else form
            known = None if matrix is None else limits
            self._waiting.append((number, take_sample(values, q, known)))
        if len(self._waiting) >= _BATCH:
            self._measure()

    def _measure(self) -> None:
        numbers, samples = [n for n, _ in self._waiting], [sample for _, sample in self._waiting]
        self._measured |= zip(numbers, evaluate(samples), strict=True)
        self._waiting.clear()

    def lines(self, about: str) -> Lines:
        """Lines of the file; ``about``: what all of them begin with."""
        self._measure()
        self._measured |= self._kernels.evaluate()
        if not self._measured:
            return Lines([], [])
        rows = self._read_back()
        order = [i for members in self._of.values() for i in members]
        abouts = [self._measured[i].about for i in order]
        vectors = np.stack([rows[i] for i in order])
        quoted = {module: json.dumps(module) for module, _, _ in self._of}
        heads = [
            f'{about}, "module": {quoted[module]}, "tensor": "{tensor}", "product": "{product}"'
            for module, tensor, product in self._of
        ]
        return lines_of(heads, abouts, vectors, [len(members) for members in self._of.values()])

    def _read_back(self) -> dict[int, np.ndarray]:
        """Vectors by the numbers of their forms; a device's are read back at once."""
        found: dict[int, np.ndarray] = {}
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, (_, vector) in self._measured.items():
            if isinstance(vector, np.ndarray):
                found[number] = vector
            else:
                by_device.setdefault(vector.device, []).append((number, vector))
        for each in by_device.values():
            vectors = torch.stack([vector for _, vector in each]).cpu().numpy()
            found |= zip([number for number, _ in each], vectors, strict=True)
        return found


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_ranked() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _warn(step: int, found: list[dict[str, Any]]) -> None:
    if not found:
        return
    line = found[0]
    value, at = line.get("first_nonfinite_value"), line["first_nonfinite"]
    others = f"; {len(found) - 1} more after it" if len(found) > 1 else ""
    warnings.warn(
        f"step {step}: {line['tensor']} of {line['module'] or 'the model'} for {line['product']} "
        f"have NaN or infinities in {line['nonfinite_blocks']} of {line['blocks']} blocks, the "
        f"first{f' ({value})' if value else ''} at {at}{others}",
        NonfiniteWarning,
        stacklevel=2,
    )
