"""The console: web pages for the person at the controls, over the broker's client, the overview and the plans.

It needs ``escrowmq[console]`` and raises Misuse(MISSING_PACKAGE) without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from escrowmq.console.limits import ConsoleSettings
    from escrowmq.console.server import beside, serve

_LAZY = {"ConsoleSettings": "limits", "serve": "server", "beside": "server"}
_PACKAGES = {"fastapi", "starlette", "pydantic", "uvicorn", "httpx", "jinja2", "markupsafe"}

__all__ = ["ConsoleSettings", "beside", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'escrowmq.console' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"escrowmq.console.{_LAZY[name]}")
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise Misuse(
            Code.MISSING_PACKAGE,
            f"the console needs {package}, which is not installed",
            'python -m pip install "escrowmq[console]"',
        ) from problem
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
