"""Finds an app by its name, ``MODULE:APP``."""

from __future__ import annotations

import importlib
import os
import sys

from escrowmq.errors import Code, Misuse
from escrowmq.handlers.app import App

DEFAULT_NAME = "app"


def load_app(name: str) -> App:
    """Import a module, also from the current folder, and return its app. Raises Misuse(BAD_ARGUMENT); an error of the
    module itself is raised as it is."""
    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if not module_name or problem.name not in (module_name, module_name.partition(".")[0]):
            raise
        hint = "MODULE:APP, importable or in the current folder: shop:app is the App named app in shop.py"
        raise Misuse(Code.BAD_ARGUMENT, f"there is no module {module_name!r}", hint) from None
    except ValueError:
        raise Misuse(Code.BAD_ARGUMENT, f"{name!r} names no module", "MODULE:APP, such as shop:app") from None
    app = getattr(module, attribute or DEFAULT_NAME, None)
    if not isinstance(app, App):
        apps = [key for key, value in vars(module).items() if isinstance(value, App)]
        hint = f"it has {', '.join(apps)}" if apps else "app = App()"
        raise Misuse(Code.BAD_ARGUMENT, f"{module_name}.{attribute or DEFAULT_NAME} is no App", hint)
    return app
