"""The ASGI application: routes, error responses, the OpenAPI document and its HTML page."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from escrowmq.gateway import problems
from escrowmq.gateway.admission import RAW_TYPE, is_event, kind_of
from escrowmq.gateway.callers import Callers
from escrowmq.gateway.models import Problem, ReceiptOut
from escrowmq.gateway.routes import choose_gateway, consumers, looking, messages, page, transactions

_PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {"model": Problem, "description": "Refused: 400, 403, 404, 409, 410, 413, 429, 500, 503 or 504."}
}


class _RawRoute(APIRoute):
    """A route for requests with a raw body or an event; others of the same path match the next route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        headers = Headers(scope=scope)
        return (match, found) if kind_of(headers) == RAW_TYPE or is_event(headers) else (Match.NONE, {})


def build(callers: Callers) -> FastAPI:
    """Return the application over the connections of callers; who calls this closes them."""
    app = FastAPI(
        title="EscrowMQ gateway",
        version=version("escrowmq"),
        description="A transactional message broker over HTTP, for those who cannot hold a connection.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_PROBLEM,
    )
    app.state.callers = callers
    raw = APIRouter(route_class=_RawRoute)
    raw.add_api_route(
        "/topics/{topic}/messages",
        messages.send_raw,
        methods=["POST"],
        response_model=ReceiptOut,
        include_in_schema=False,
    )
    first = APIRouter(prefix="/v1", dependencies=[Depends(choose_gateway)])
    for router in (raw, messages.router, transactions.router, consumers.router, looking.router):
        first.include_router(router)
    app.include_router(first)
    app.include_router(looking.health_router)
    problems.install(app)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.page(app.openapi()), headers=page.HEADERS)

    return app
