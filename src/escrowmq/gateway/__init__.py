"""An HTTP gateway to the broker for clients with short connections, with check-back to configured URLs.

:func:`verify` and :func:`sign_answer`, for receivers of check-backs, work without FastAPI. The server needs
``escrowmq[http]`` and raises Misuse(MISSING_PACKAGE) without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

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
_PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "httpx")

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


__getattr__ = from_extra(__name__, _LAZY, needs=dict.fromkeys(_PACKAGES, "http"), who="the HTTP gateway")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
