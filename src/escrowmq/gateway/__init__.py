"""An HTTP gateway to the broker for clients with short connections, with check-back to configured URLs.

What a receiver of check-backs needs (:func:`verify`, :func:`sign_answer`) works without FastAPI; the server itself needs
``escrowmq[http]`` and raises Misuse(MISSING_PACKAGE) without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from escrowmq.gateway.addresses import Address, read_addresses
    from escrowmq.gateway.limits import GatewaySettings
    from escrowmq.gateway.server import beside, serve
    from escrowmq.gateway.signing import ReplayGuard, sign, sign_answer, verify

_LAZY = {
    name: module
    for module, names in {
        "signing": ("verify", "sign", "sign_answer", "ReplayGuard"),
        "addresses": ("Address", "read_addresses"),
        "limits": ("GatewaySettings",),
        "server": ("serve", "beside"),
    }.items()
    for name in names
}
_PACKAGES = {"fastapi", "starlette", "pydantic", "uvicorn", "httpx"}

__all__ = [
    "Address",
    "GatewaySettings",
    "ReplayGuard",
    "beside",
    "read_addresses",
    "serve",
    "sign",
    "sign_answer",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'escrowmq.gateway' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"escrowmq.gateway.{_LAZY[name]}")
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise Misuse(
            Code.MISSING_PACKAGE,
            f"the HTTP gateway needs {package}, which is not installed",
            'python -m pip install "escrowmq[http]"',
        ) from problem
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
