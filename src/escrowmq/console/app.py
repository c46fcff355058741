"""The console's application: routes, rendering of responses as HTML, and error pages."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from escrowmq.console import words
from escrowmq.console.asked import Answer, Download, Page, Params, Redirect
from escrowmq.console.core import Console
from escrowmq.console.guard import Refused
from escrowmq.console.views import plans
from escrowmq.console.views.table import ROOMS, VIEWS, View
from escrowmq.errors import Code, EscrowError, Overloaded, Unknown, error
from escrowmq.gateway.problems import status_of
from escrowmq.model import FOREVER
from escrowmq.plans import ACTS

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_STATIC = {"console.css": "text/css", "console.js": "text/javascript", "mark.svg": "image/svg+xml"}


def own_path(path: str) -> str:
    """Return a path on this site: a browser reads ``//name`` as another host."""
    return "/" + path.lstrip("/\\")


def build(console: Console) -> Starlette:
    """Return the application over a console; the caller closes the console."""
    templates = _templates(console)
    files = {name: (_HERE / "static" / name).read_bytes() for name in _STATIC}

    def render(request: Request, page: Page) -> Response:
        text = templates.get_template(page.template).render(
            page=page,
            path=own_path(request.url.path),
            token=request.state.token,
            now_us=console.now_us(),
            **page.values,
        )
        return HTMLResponse(text, page.status)

    def respond(request: Request, answer: Answer) -> Response:
        match answer:
            case Page():
                return render(request, answer)
            case Redirect(to):
                return RedirectResponse(to, 303)
            case Download(name, content):
                headers = {"Content-Disposition": f'attachment; filename="{name}"'}
                return Response(content, 200, headers, "application/octet-stream")

    def problem_page(request: Request, problem: EscrowError, status: int) -> Response:
        page = Page("problem.html", "This did not work", {"problem": problem}, status=status)
        response = render(request, page)
        if isinstance(problem, Overloaded):
            response.headers["Retry-After"] = str(max(math.ceil(problem.retry_after), 1))
        return response

    def endpoint(view: View) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            if (refused := request.state.refused) is not None:
                return problem_page(request, refused.problem, refused.status)
            params = Params(request.url.path, request.path_params, dict(request.query_params), request.state.form)
            try:
                loop = asyncio.get_running_loop()
                # A page is rendered on its thread, template included: a long one must not delay the others.
                work = loop.run_in_executor(console.threads, lambda: respond(request, view(console, params)))
                return await asyncio.wait_for(asyncio.shield(work), console.settings.page_timeout)
            except TimeoutError:
                text = f"there was no answer within {console.settings.page_timeout:g} seconds"
                slow = Unknown(Code.TIMED_OUT, text, "the broker may be busy or stopped; look at the overview")
                return problem_page(request, slow, 504)
            except EscrowError as problem:
                return problem_page(request, problem, status_of(problem))

        return serve

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if (refused := request.state.refused) is not None:
            raise HTTPException(refused.status)
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=_STATIC[name])

    async def on_http(request: Request, problem: Any) -> Response:
        if (refused := request.state.refused) is not None:
            return problem_page(request, refused.problem, refused.status)
        if problem.status_code == 405:
            return problem_page(request, error(Code.BAD_REQUEST, "this address does not take that"), 405)
        nothing = error(Code.NOT_FOUND, "there is no such page", "begin at the overview")
        return problem_page(request, nothing, problem.status_code)

    async def on_bug(request: Request, problem: Exception) -> Response:
        logger.error("a page failed", exc_info=problem)
        return problem_page(request, Unknown(Code.CLOSED, "the console failed on this page; its log says why"), 500)

    routes = [Route(path, endpoint(view), methods=methods) for path, methods, view in VIEWS]
    return Starlette(
        routes=[*routes, Route("/static/{name}", static)],
        exception_handlers={HTTPException: on_http, Refused: on_http, Exception: on_bug},
    )


def _templates(console: Console) -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(words.FILTERS)
    made.filters["id"] = id
    globals_: Mapping[str, Any] = {
        "rooms": ROOMS,
        "brokers": console.addresses,
        "databases": list(console.engines),
        "act_words": plans.WORDS,
        "plan_acts": ACTS,
        "forever": FOREVER,
        "version": version("escrowmq"),
    }
    made.globals.update(globals_)
    return made
