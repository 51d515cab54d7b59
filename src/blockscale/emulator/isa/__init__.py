"""The instructions, one family a file; importing this package registers all of them."""

import importlib
import pkgutil

from .registry import Built, build, families

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Built", "build", "families"]
