"""The console's application: routes, login, rendering of responses as HTML, and error pages."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from escrowmq.acts.telling import acting_as
from escrowmq.console import words
from escrowmq.console.asked import MAX_TEXT, Answer, Download, Page, Params, Redirect
from escrowmq.console.core import Console
from escrowmq.console.guard import Refused
from escrowmq.console.limits import ConsoleSettings
from escrowmq.console.sessions import LoginNeeded, Sessions
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


def build(sessions: Sessions, settings: ConsoleSettings, *, is_exposed: bool = False) -> Starlette:
    """Return the application over the consoles of sessions; the caller closes them. ``is_exposed``: each page says that
    other machines reach it without TLS or access rights."""
    templates = _templates()
    templates.globals["is_exposed"] = is_exposed
    files = {name: (_HERE / "static" / name).read_bytes() for name in _STATIC}

    def render(request: Request, page: Page, console: Console | None) -> Response:
        """Render a page; without a console it shows nothing of brokers and databases."""
        text = templates.get_template(page.template).render(
            page=page,
            path=own_path(request.url.path),
            token=request.state.token,
            **_values_of(console),
            **page.values,
        )
        return HTMLResponse(text, page.status)

    def respond(request: Request, answer: Answer, console: Console) -> Response:
        match answer:
            case Page():
                return render(request, answer, console)
            case Redirect(to):
                return RedirectResponse(to, 303)
            case Download(name, content):
                headers = {"Content-Disposition": f'attachment; filename="{name}"'}
                return Response(content, 200, headers, "application/octet-stream")

    def problem_page(request: Request, problem: EscrowError, status: int, console: Console | None = None) -> Response:
        page = Page("problem.html", "This did not work", {"problem": problem}, status=status)
        response = render(request, page, console)
        if isinstance(problem, Overloaded):
            response.headers["Retry-After"] = str(max(math.ceil(problem.retry_after), 1))
        return response

    async def respond_in(request: Request, work: Callable[[Console], Awaitable[Response]]) -> Response:
        """Respond by ``work`` in the console of the request's session, or lead to the login page."""
        if (refused := request.state.refused) is not None:
            return problem_page(request, refused.problem, refused.status)
        try:
            async with sessions.enter(request.state.known_cookie) as console:
                return await work(console)
        except LoginNeeded:
            return RedirectResponse(_login_path(request), 303)
        except EscrowError as problem:
            return problem_page(request, problem, status_of(problem))

    def endpoint(view: View) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            params = Params(request.url.path, request.path_params, dict(request.query_params), request.state.form)

            async def work(console: Console) -> Response:
                def run() -> Response:
                    with acting_as(console.user):
                        return respond(request, view(console, params), console)

                try:
                    # A page is rendered on its thread, template included: a long one must not delay the others.
                    rendering = asyncio.get_running_loop().run_in_executor(console.threads, run)
                    return await asyncio.wait_for(asyncio.shield(rendering), settings.page_timeout)
                except TimeoutError:
                    text = f"there was no answer within {settings.page_timeout:g} seconds"
                    slow = Unknown(Code.TIMED_OUT, text, "the broker may be busy or stopped; look at the overview")
                    return problem_page(request, slow, 504, console)
                except EscrowError as problem:
                    if problem.code is Code.UNAUTHENTICATED:
                        raise
                    return problem_page(request, problem, status_of(problem), console)

            return await respond_in(request, work)

        return serve

    async def login(request: Request) -> Response:
        form, state = request.state.form, request.state
        if state.refused is not None:
            return problem_page(request, state.refused.problem, state.refused.status)
        to = own_path((form.get("next") or [request.query_params.get("next", "")])[0])
        values = {"to": to, "problem": ""}
        try:
            if not await sessions.needs_login():
                return RedirectResponse(to, 303)
            if request.method != "POST":
                with suppress(LoginNeeded):
                    async with sessions.enter(state.known_cookie):
                        return RedirectResponse(to, 303)
                return render(request, Page("login.html", "Log in", values), None)
            cookie = state.new_cookie()
            source = request.client.host if request.client is not None else ""
            await sessions.begin(form.get("access_token", ("",))[0].strip(), source, state.known_cookie, cookie)
        except EscrowError as problem:
            if problem.code is not Code.UNAUTHENTICATED:
                logger.warning("a login could not be checked: %s", problem)
            values["problem"] = problem.code.sentence  # its message may name a broker
            return render(request, Page("login.html", "Log in", values, status=status_of(problem)), None)
        state.cookie = cookie
        return RedirectResponse(to, 303)

    async def logout(request: Request) -> Response:
        async def work(_: Console) -> Response:
            sessions.end(request.state.known_cookie)
            request.state.cookie = request.state.new_cookie()
            return RedirectResponse("/login", 303)

        return await respond_in(request, work)

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if (refused := request.state.refused) is not None:
            raise HTTPException(refused.status)
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=_STATIC[name])

    async def on_http(request: Request, problem: Any) -> Response:
        async def work(console: Console) -> Response:
            if problem.status_code == 405:
                return problem_page(request, error(Code.BAD_REQUEST, "this address does not take that"), 405, console)
            nothing = error(Code.NOT_FOUND, "there is no such page", "begin at the overview")
            return problem_page(request, nothing, problem.status_code, console)

        return await respond_in(request, work)

    async def on_bug(request: Request, problem: Exception) -> Response:
        logger.error("a page failed", exc_info=problem)
        return problem_page(request, Unknown(Code.CLOSED, "the console failed on this page; its log says why"), 500)

    routes = [Route(path, endpoint(view), methods=methods) for path, methods, view in VIEWS]
    routes += [Route("/login", login, methods=["GET", "POST"]), Route("/logout", logout, methods=["POST"])]
    return Starlette(
        routes=[*routes, Route("/static/{name}", static)],
        exception_handlers={HTTPException: on_http, Refused: on_http, Exception: on_bug},
    )


def _login_path(request: Request) -> str:
    """Return the address of the login page, which leads back to the requested page."""
    if request.method == "POST":
        return "/login"
    path = own_path(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
    return "/login?" + urlencode({"next": path if len(path) <= MAX_TEXT else "/"})


def _values_of(console: Console | None) -> Mapping[str, Any]:
    """Return what templates need of a console."""
    if console is None:
        return {"brokers": [], "databases": [], "user": ""}
    last = console.sampler.last()
    groups = None if last is None else last.groups
    return {
        "brokers": console.addresses,
        "databases": console.databases,
        "user": console.user,
        "lacks": console.lacks,
        "lacks_plan": console.lacks_plan,
        "now_us": console.now_us(),
        "counters": {} if groups is None else {"/dead-letters": groups.dead, "/transactions": groups.undecided},
    }


def _templates() -> Environment:
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
        "act_words": plans.WORDS,
        "plan_acts": ACTS,
        "forever": FOREVER,
        "version": version("escrowmq"),
    }
    made.globals.update(globals_)
    return made
