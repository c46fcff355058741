"""The web console for operators, over the broker's client, the overview and the plans.

It needs ``escrowmq[console]`` and raises Misuse(MISSING_PACKAGE) without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.console.limits import ConsoleSettings
    from escrowmq.console.server import beside, serve

_LAZY = {"ConsoleSettings": "limits", "serve": "server", "beside": "server"}
_PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "httpx", "jinja2", "markupsafe")

__all__ = ["ConsoleSettings", "beside", "serve"]


__getattr__ = from_extra(__name__, _LAZY, needs=dict.fromkeys(_PACKAGES, "console"), who="the console")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
