"""``python -m examples.ladder``."""

import typer

from .bench import main

typer.run(main)
