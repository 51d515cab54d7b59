"""``blockscale train``: one small GPT under several recipes, and what each does to its loss."""

from __future__ import annotations

import json as json_module
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..training import Comparison, Progress, Settings, Work
    from ..training.launch import Place

__all__ = ["train"]

#: Those of the report, narrow enough for 80 characters.
_COLUMNS = (
    "recipe",
    "train\nloss",
    "validation\nloss",
    "minus\nbf16",
    "in %",
    "saturated\n/ million",
    "SQNR (dB) of\nx    w    g",
)


def train(
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Recipe to train under; repeatable. Default: those of the docs."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps of each run. Default: 250, cuda 1000.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="On cuda, instead of --steps: as many as the slowest recipe makes in it."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of each recipe, with seeds 0, 1, ... Default: 3, cuda 1."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda: a larger model. Default: cpu.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="File to learn from, .gz or not; or site-packages: the Python sources installed "
            "here. Default: Shakespeare, cuda site-packages."
        ),
    ] = None,
    moe: Annotated[
        bool, typer.Option("--moe", help="Blocks of experts: bf16, fp8_block, mxfp8; cuda 1 B.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the model's blocks by torch.compile.")
    ] = False,
    fsdp: Annotated[
        int | None,
        typer.Option(
            help="Ranks that train each run together, a part of each batch each; started here or "
            "by torchrun."
        ),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            help="With --moe, ranks that share experts, a part of each batch each; times as many "
            "as --fsdp has."
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Ranks that share each layer; times as many as --fsdp and --ep have."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New or empty folder. Default: runs/train-001, -002, ...")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Minutes after which runs are saved, to go on later.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of runs that were stopped: go on with them.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Train a small GPT under several recipes and compare their losses.

    Same seeds and batches for all. Leaves a folder with loss.png, report.html and results.json.
    Stopped (Ctrl-C, a signal to end, --stop-after), it leaves what --resume goes on from; of runs
    of ranks with --fsdp, --ep and --tp by other numbers of them.
    """
    from .. import training
    from ..training import saves
    from ..training.settings import check_device

    began = time.perf_counter()
    if stop_after is not None and not stop_after > 0:
        raise ValueError(f"stop-after: got {stop_after:g}; give more minutes than 0")
    options: dict[str, object] = {
        "recipe": recipe,
        "steps": steps,
        "minutes": minutes,
        "seeds": seeds,
    }
    options |= {"device": device, "data": data, "moe": moe, "compile": compile, "out": out}
    if resume is not None:
        _check_alone(options)
        plan = training.Plan.read(resume).by_ranks(fsdp=fsdp, ep=ep, tp=tp)
        text = training.choose_text(plan.data, plan.settings.device)
        plan.check(text)
        check_device(plan.settings.device)
    else:
        where = device or "cpu"
        names = training.check_recipes(recipe or training.default_recipes(where, moe))
        given = {"steps": steps, "seeds": seeds, "compile": compile or None}
        given |= {"fsdp": fsdp, "ep": ep, "tp": tp}
        settings = training.Settings.on(
            where, moe, **{name: value for name, value in given.items() if value is not None}
        )
        text = training.choose_text(data, where)
        training.Corpus(text, settings.context)  # refuses a text that is too short
        _check_minutes(minutes, {"steps": steps, "fsdp": fsdp, "ep": ep, "tp": tp}, where)
        plan = training.Plan(names, settings, data, saves.digest(text))
    work = training.Work(plan.recipes, text, plan.settings)
    place = training.torchrun_place(plan.settings)
    if place is not None and place.rank:
        _follow(place, work)
    folder = resume if resume is not None else training.prepare_folder(out)
    ends = math.inf if stop_after is None else began + 60 * stop_after
    with _left_as_found(folder, anew=resume is None):
        if resume is None:
            if minutes is not None:
                found = training.steps_within(minutes, plan.recipes, text, plan.settings)
                plan = replace(plan, settings=replace(plan.settings, steps=found))
            plan.write(folder)
        with (
            saves.alone(folder),
            _watched(plan.recipes, plan.settings) as report,
            _told_to_stop(ends) as stop,
        ):
            try:
                if resume is not None:
                    plan.write(folder)  # with the number of ranks that go on
                runs = training.compare(plan.recipes, text, plan.settings, report, folder, stop)
            except training.RankLost as error:
                again = f"go on with: blockscale train --resume {folder}"
                if not saves.saved_runs(folder):
                    again = "nothing was saved yet: start anew"
                typer.echo(f"blockscale: {error}; {again}", err=True)
                raise typer.Exit(1) from None
            except training.Stopped:
                again = f"blockscale train --resume {folder}"
                typer.echo(f"stopped and saved; go on with: {again}", err=True)
                raise typer.Exit(0 if time.perf_counter() >= ends else 130) from None
    seconds = sum(run.seconds for run in runs)  # of all calls; on a CPU they share the cores
    if resume is None:
        seconds = time.perf_counter() - began
    comparison = training.Comparison(runs, plan.settings, text, seconds)
    training.write_report(comparison, folder)
    saves.forget(folder)
    if json:
        typer.echo(json_module.dumps(comparison.to_json(), indent=1))
    else:
        _show(comparison, folder)


def _follow(place: Place, work: Work) -> NoReturn:
    """Be another rank than the first one, which says everything."""
    from .. import training
    from ..training.workers import leave

    with _told_to_stop(math.inf, say=False) as stop:
        try:
            training.train_as_rank(place, work, stop=stop)
        except training.Stopped:
            pass
        except training.RankLost:
            raise typer.Exit(1) from None
    leave()


@contextmanager
def _left_as_found(folder: Path, *, anew: bool) -> Iterator[None]:
    """Where something fails before any run is saved, a folder that was made for it goes."""
    from ..training import saves

    try:
        yield
    except BaseException:
        if anew and not saves.saved_runs(folder):
            saves.forget(folder)
            if not any(folder.iterdir()):
                folder.rmdir()
        raise


def _check_alone(options: dict[str, object]) -> None:
    """ValueError where one is given: the folder of stopped runs has them."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise ValueError(
            f"resume: is given beside {', '.join(given)}; runs go on as they began: leave it out"
        )


@contextmanager
def _told_to_stop(ends: float, say: bool = True) -> Iterator[Callable[[], bool]]:
    """Gives what is true after SIGINT or SIGTERM, and from ``ends`` on; a second signal raises
    KeyboardInterrupt."""
    told = threading.Event()

    def tell(number: int, frame: object) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()
        if say:
            typer.echo("stopping after this step; once more to end at once", err=True)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, tell) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: told.is_set() or time.perf_counter() >= ends
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _check_minutes(minutes: float | None, beside: dict[str, int | None], device: str) -> None:
    if minutes is None:
        return
    if not minutes > 0:
        raise ValueError(f"minutes: got {minutes:g}; give more than 0")
    for name, value in beside.items():
        if value is not None:
            raise ValueError(f"minutes: is given beside {name}; give one of them")
    if device == "cpu":
        raise ValueError("minutes: on a CPU runs share the cores; give --steps")


def _show(comparison: Comparison, folder: Path) -> None:
    from ..training.report import cells

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to fold to
        console = Console(width=1000)
    steps, seeds = comparison.settings.steps, comparison.settings.seeds
    title = f"{steps} steps, mean of {seeds} seeds" if seeds > 1 else f"{steps} steps, one seed"
    gap = 1 if console.width < 100 else 3
    table = Table(title=title, title_justify="left", box=None, padding=(0, gap, 0, 0))
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in comparison.rows():
        *most, x, w, g = cells(row)
        table.add_row(*most, f"{x:>4} {w:>4} {g:>4}")
    console.print(table)
    spread = "; ±: standard deviation over seeds" if comparison.settings.seeds > 1 else ""
    console.print(Text(f"x, w, g: activations, weights, gradients{spread}"))
    for sentence in comparison.verdict():
        console.print(Text(sentence), soft_wrap=True)
    console.print(Text(f"{folder}: loss.png, report.html, results.json"), soft_wrap=True)


@contextmanager
def _watched(names: tuple[str, ...], settings: Settings) -> Iterator[Callable[[Progress], None]]:
    """What to call after each step: moves a bar for each run, or prints lines into a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda event: _line(event, settings)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=16),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[status]}"),
    )
    with bars.Progress(*columns, console=console) as progress:
        tasks = {
            (name, seed): progress.add_task(
                f"{name} [dim]seed {seed}[/]", total=settings.steps, status="[dim]waiting[/]"
            )
            for seed in range(settings.seeds)
            for name in names
        }
        validation: dict[tuple[str, int], str] = {}  # the second loss of the line, once known

        def report(event: Progress) -> None:
            run = event.recipe, event.seed
            if event.validation_loss is not None:
                validation[run] = f" / {event.validation_loss:.3f}"
            progress.update(
                tasks[run],
                completed=event.step,
                status=f"loss {event.loss:.3f}{validation.get(run, '')}, "
                f"{event.tokens_per_second:,.0f} tokens/s",
            )

        yield report


def _line(event: Progress, settings: Settings) -> None:
    if event.validation_loss is not None:
        typer.echo(
            f"{event.recipe} seed {event.seed}: step {event.step}/{settings.steps}, "
            f"loss {event.loss:.3f}, validation {event.validation_loss:.3f}, "
            f"{event.tokens_per_second:,.0f} tokens/s",
            err=True,
        )
