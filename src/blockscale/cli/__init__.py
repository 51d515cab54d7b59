"""The command line. Every command is a module; errors are one line and exit code 2."""

from __future__ import annotations

import sys

import click
import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="blockscale",
    help="Block-scaled low precision: train, quantize, inspect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# from .train import train; app.command()(train): a line a command


def main() -> None:
    """Entry point of ``blockscale``: bad input is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        _fail(error.format_message())
    except (ValueError, TypeError, OSError) as error:
        _fail(str(error))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"blockscale: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
