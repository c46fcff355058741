"""Access control of the console: allowed hosts and origins, limits on forms, and security headers.

Rules:

1. A request for another host name is rejected (a foreign page could resolve its own name to this machine).
2. A form is accepted only from a page of this console: by ``Origin``, and by its token
   (:mod:`escrowmq.console.tokens`).
3. A form has limits in bytes, fields and time. Concurrent forms and concurrent pages have separate limits, so that slow
   forms block no page; a form above the limit displaces the oldest one.
4. No response may be cached, framed, sniffed or read by another site; a page loads scripts, styles and images only from
   here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from escrowmq.console.limits import ConsoleSettings
from escrowmq.console.tokens import Tokens
from escrowmq.errors import Code, Denied, EscrowError, Overloaded, Rejected
from escrowmq.platform.listening import host_name, is_loopback

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FORM_TYPE = "application/x-www-form-urlencoded"


class Refused(Exception):
    """A rejected request: the error and the HTTP status."""

    def __init__(self, problem: EscrowError, status: int) -> None:
        super().__init__(str(problem))
        self.problem, self.status = problem, status


class Guard:
    """ASGI middleware around the console's application. ``hosts``: accepted host names, in lower case."""

    def __init__(self, app: ASGIApp, settings: ConsoleSettings, tokens: Tokens, hosts: Collection[str]) -> None:
        self._app = app
        self._settings = settings
        self._tokens = tokens
        self._hosts = frozenset(hosts)
        self._requests = 0
        self._reading: dict[asyncio.Timeout, None] = {}
        """Forms being read, oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it to the application."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        known = self._tokens.cookie_of(headers.get("cookie", ""))
        cookie = known or self._tokens.new_cookie()
        state = scope.setdefault("state", {})
        state |= {"token": self._tokens.of(cookie), "form": {}, "refused": None}
        state |= {"known_cookie": known, "cookie": cookie, "new_cookie": self._tokens.new_cookie}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                given.update(HEADERS)
                if state["cookie"] != known:  # there was none, or a session begins or ends
                    given.append("Set-Cookie", f"{self._tokens.name}={state['cookie']}; {self._tokens.attributes}")
                if state["refused"] is not None:
                    given["Connection"] = "close"  # its form may be unread
            await send(message)

        try:
            self._check(scope["method"], headers)
            if scope["method"] == "POST":
                state["form"] = self._parse_form(await self._read_in_time(headers, receive))
                if not self._tokens.fits(known, state["form"].pop("token", ("",))[0]):
                    raise Refused(
                        Denied(
                            Code.DENIED,
                            "this form is not one that this console gave to this browser",
                            "go back, load the page anew, and send it again: the console may have been started anew "
                            "meanwhile",
                        ),
                        403,
                    )
        except Refused as refused:
            state["refused"] = refused
        except TimeoutError:
            state["refused"] = Refused(Rejected(Code.BAD_REQUEST, "the form did not come in time"), 408)
        self._requests += 1
        if self._requests > self._settings.max_requests and state["refused"] is None:
            state["refused"] = Refused(
                Overloaded(Code.QUEUE_FULL, "too many pages are being made at once", "try again"), 503
            )
        try:
            await self._app(scope, receive, answer)
        finally:
            self._requests -= 1

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host_name(host)
        if not (name in self._hosts or is_loopback(name)):
            hint = "ask for an address of this machine, or name this one with --host when the console starts"
            raise Refused(Denied(Code.DENIED, f"this console is not {host!r:.100}", hint), 403)
        if method == "POST" and headers.get("origin", "").partition("://")[2] != host:
            raise Refused(Denied(Code.DENIED, "a page of another site may not send forms here"), 403)
        if method not in ("GET", "HEAD", "POST"):
            raise Refused(Rejected(Code.BAD_REQUEST, "a console takes GET, HEAD and POST"), 405)

    async def _read_in_time(self, headers: Headers, receive: Receive) -> bytes:
        """Read a form. Raises TimeoutError if it is too slow, or displaced by others."""
        async with asyncio.timeout(self._settings.form_timeout) as limit:
            self._reading[limit] = None
            try:
                if len(self._reading) > self._settings.max_forms:
                    oldest = next(iter(self._reading))
                    del self._reading[oldest]
                    oldest.reschedule(asyncio.get_running_loop().time())
                return await self._read(headers, receive)
            finally:
                self._reading.pop(limit, None)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """Read the form's bytes, up to the limit."""
        most = self._settings.max_form_bytes
        large = Refused(Rejected(Code.BATCH_TOO_LARGE, f"a form has at most {most:,} bytes"), 413)
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 12 or int(declared) > most):
            raise large
        if headers.get("content-type", "").partition(";")[0].strip().lower() != FORM_TYPE:
            raise Refused(Rejected(Code.BAD_REQUEST, f"a form is {FORM_TYPE}"), 415)
        read = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(Rejected(Code.BAD_REQUEST, "the browser went away"), 400)
            read += message.get("body", b"")
            if len(read) > most:
                raise large
            if not message.get("more_body", False):
                return bytes(read)

    def _parse_form(self, body: bytes) -> dict[str, tuple[str, ...]]:
        try:
            pairs = parse_qsl(
                body.decode("ascii"),
                keep_blank_values=True,
                strict_parsing=bool(body),
                errors="strict",
                max_num_fields=self._settings.max_fields,
            )
        except (ValueError, UnicodeError) as problem:
            raise Refused(Rejected(Code.BAD_REQUEST, f"this is no form: {problem}"), 400) from None
        form: dict[str, tuple[str, ...]] = {}
        for name, value in pairs:
            form[name] = (*form.get(name, ()), value)
        return form
