"""The command line. Every command is a module; errors are one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import __version__
from . import bench_model, emulate_gemm, emulate_mega, emulate_quantize
from .bench import bench
from .convert_checkpoint import convert_checkpoint
from .doctor import doctor
from .emulate import emulate
from .inspect import inspect
from .quantize import quantize
from .train import train
from .warm import warm

__all__ = ["app", "main"]

app = typer.Typer(
    name="blockscale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"blockscale {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Block-scaled low precision: train, quantize, inspect."""


app.command()(doctor)
app.command()(inspect)
app.command()(quantize)
app.command("convert-checkpoint")(convert_checkpoint)
app.command()(train)
app.command()(warm)
emulate.command("gemm")(emulate_gemm.gemm)
emulate.command("megamoe")(emulate_mega.megamoe)
emulate.command("quantize")(emulate_quantize.quantize)
app.add_typer(emulate, name="emulate")
bench.command("model")(bench_model.model)
app.add_typer(bench, name="bench")

# typer carries its own copy of click: this is its ClickException, the base of all usage errors
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    """Entry point of ``blockscale``: bad input is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except _UsageError as error:
        _fail(getattr(error, "format_message", error.__str__)())
    except (ValueError, TypeError, OSError) as error:
        _fail(str(error))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    if message:  # empty where help was printed instead
        print(f"blockscale: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
