"""The matrix over the console: every page and form, in each role, for things that exist and for things that do not.
Visitors without a session are in test_console_login.py.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from console_rights import GROUP, TOPIC, World, address_of, form_of, log_in, plan_by, principals
from console_visitor import Visitor
from console_world import QUICK
from guarded_broker import guarded
from rights_table import ABSENT, CALLERS, lacking, sentence

from escrowmq.console import app
from escrowmq.console.limits import ConsoleSettings
from escrowmq.console.sessions import Sessions
from escrowmq.console.views.table import VIEWS
from escrowmq.errors import Code, EscrowError

READ, ACT = f"read {TOPIC}", f"act {GROUP}"
PAGES: dict[tuple[str, str], list[list[str]]] = {
    ("GET", "/"): [],
    ("GET", "/find"): [["view"]],
    ("GET", "/waiting"): [["view"]],
    ("GET", "/topics"): [["view"]],
    ("GET", "/topics/{topic}"): [[READ]],
    ("POST", "/topics/{topic}/alter"): [["admin"]],
    ("GET", "/topics/{topic}/delete"): [["admin"]],
    ("POST", "/topics/{topic}/delete"): [["admin"]],
    ("GET", "/topics/{topic}/message"): [[READ]],
    ("GET", "/topics/{topic}/body"): [[READ]],
    ("GET", "/groups"): [["view"]],
    ("GET", "/groups/{group}"): [["view"]],
    ("POST", "/groups/{group}/pause"): [[ACT]],
    ("POST", "/groups/{group}/resume"): [[ACT]],
    ("POST", "/groups/{group}/fence"): [[ACT]],
    ("GET", "/groups/{group}/reset"): [[ACT]],
    ("POST", "/groups/{group}/reset"): [[ACT]],
    ("POST", "/groups/{group}/delete"): [["view", "admin"]],
    ("GET", "/producers"): [["view"]],
    ("GET", "/producers/{group}/alter"): [["view"]],
    ("POST", "/producers/{group}/alter"): [["act shop"]],
    ("GET", "/transactions"): [["view"]],
    ("GET", "/transactions/{id}"): [["view"], ["produce pay"]],
    ("GET", "/dead-letters"): [["view"]],
    ("GET", "/dead-letters/{group}"): [["view"]],
    ("GET", "/dead-letters/{group}/letter"): [["view", READ]],
    ("GET", "/dead-letters/{group}/edit"): [["view", READ]],
    ("POST", "/dead-letters/{group}/edit"): [["view", READ, ACT]],
    ("POST", "/dead-letters/{group}/retry"): [[ACT]],
    ("GET", "/databases"): [["view"]],
    ("GET", "/plans"): [["view"]],
    ("POST", "/plans"): [[ACT, "view"]],
    ("GET", "/plans/new"): [["view"]],
    ("GET", "/plans/{id}"): [["view"]],
    ("GET", "/plans/{id}/rows"): [["view"]],
    ("POST", "/plans/{id}/dry-run"): [["view", ACT]],
    ("POST", "/plans/{id}/run"): [["view", ACT]],
    ("POST", "/plans/{id}/stop"): [["view", ACT]],
    ("POST", "/plans/{id}/delete"): [["view", ACT]],
    ("GET", "/work/{id}"): [],
    ("GET", "/acts"): [["view"]],
    ("GET", "/acts/verify"): [["view"]],
    ("GET", "/acts/{number}"): [["view"]],
}
"""By method and path: sets of rights of which each is enough, in the order of their refusal. Without one it is open to
every session."""
OPEN = {("GET", "/login"), ("POST", "/login"), ("POST", "/logout"), ("GET", "/static/{name}")}
NOTHING_THERE = {"/work/{id}", "/groups/{group}/fence"}
"""There is no job and no member: who may do it gets 404."""
NO_PLAN = "20260101-000000-000000"


def unlisted() -> set[tuple[str, str]]:
    """Routes of the console without an entry, and entries without a route."""

    def make(_: str) -> Any:
        raise EscrowError(Code.CLOSED)

    routes: list[Any] = app.build(Sessions(make, ConsoleSettings(), needs_login=True), ConsoleSettings()).routes
    found = {(method, one.path) for one in routes for method in (one.methods or {"GET"}) - {"HEAD"}}
    return found ^ (set(PAGES) | OPEN)


def test_every_page_is_in_the_table() -> None:
    assert unlisted() == set()


def test_a_new_page_without_an_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "VIEWS", [*VIEWS, ("/secrets", ["GET"], VIEWS[0][2])])
    assert unlisted() == {("GET", "/secrets")}


class Visited:
    """A console with a visitor of each role, logged in, and an operator who makes plans."""

    def __init__(self, world: World, url: str) -> None:
        self.world = world
        self.plan = NO_PLAN
        self.visitors = {name: Visitor(url) for name in (*CALLERS, "boss")}
        for name, visitor in self.visitors.items():
            log_in(visitor, world.rights.tokens[name])

    def prepare(self, path: str) -> tuple[str, dict[str, Any]]:
        """The address and the form of a page, of something that exists now."""
        plan, digest = NO_PLAN, ""
        if path.startswith(("/plans", "/dead-letters/")):
            self.wait_for_plan()
            self.world.have_letters()
        if path.startswith("/plans/{"):
            plan, digest = plan_by(self.visitors["boss"])
            self.plan = plan
        address = address_of(path, self.world, plan)
        form = form_of(path, self.world, digest) if ("POST", path) in PAGES else {}
        if path.endswith("delete") and not path.startswith("/plans"):
            with self.world.bus("boss") as bus:
                if "spare" not in {one["name"] for one in bus.admin.topics()}:
                    bus.admin.create_topic("spare")
                bus.consumer("spare", ["spare"]).close()
        if path.endswith("delete"):
            address, form = rename(address, form, {TOPIC: "spare", GROUP: "spare"})
            form |= {"force": "yes"}
        return address, form

    def wait_for_plan(self) -> None:
        """Wait until the last plan stands still: a run in the background takes the rows of the next plan away. Each
        session knows its own runs from their beginning, others only once they are in the plan's folder."""
        deadline = time.monotonic() + 60
        for visitor in self.visitors.values():
            while "data-live" in visitor.http.get(f"/plans/{self.plan}").text:
                assert time.monotonic() < deadline, self.plan

    def ask(self, method: str, address: str, form: dict[str, Any], caller: str) -> tuple[int, str]:
        """Status of a page, and its text, or where it leads."""
        visitor = self.visitors[caller]
        if method == "GET":
            answer = visitor.http.get(address)
        else:
            visitor.get("/")
            data = {"token": visitor.token, **form}
            answer = visitor.http.post(address, data=data, headers={"Origin": visitor.url})
        return answer.status_code, answer.headers.get("location", answer.text)


def rename(address: str, form: dict[str, Any], names: dict[str, str]) -> tuple[str, dict[str, Any]]:
    for old, new in names.items():
        address = re.sub(rf"(?<=[/=]){re.escape(old)}\b", new, address)
        form = {name: value.replace(old, new) if isinstance(value, str) else value for name, value in form.items()}
    return address, form


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visited]:
    folder = tmp_path_factory.mktemp("matrix")
    rights = principals(folder)
    for name, rules in CALLERS.items():
        rights.add(name, *rules)
    with guarded(folder, rights, **QUICK) as served:
        world = World(f"escrow://127.0.0.1:{served.port}", rights, folder)
        world.fill()
        with world.bus("boss") as bus:
            bus.admin.pause_group(GROUP)  # operator action 1
            bus.admin.resume_group(GROUP)
        with world.console() as url:
            made = Visited(world, url)
            yield made
            for visitor in made.visitors.values():
                visitor.http.close()


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("method", "path"), PAGES, ids=lambda text: text)
def test_each_caller_gets_the_page_of_the_table(visited: Visited, method: str, path: str) -> None:
    permitted = []
    for caller, held in CALLERS.items():
        need = lacking(held, *PAGES[method, path]) if PAGES[method, path] else None
        address, form = visited.prepare(path)
        status, page = visited.ask(method, address, form, caller)
        if need is None:
            assert (status in (401, 403), page.startswith("/login")) == (False, False), (caller, page)
            permitted.append(status)
            continue
        assert status == 403, (caller, page)
        assert sentence(caller, need) in html.unescape(page), caller
        names = {TOPIC: "gone", GROUP: "gone", "shop": "gone", "spare": "gone"}
        transaction = visited.world.transaction
        names |= {
            transaction: transaction[:8] + ABSENT[8:],
            address.split("/")[2] if "/plans/" in address else "-": NO_PLAN,
        }
        absent, none = rename(address, form, names)
        status, page = visited.ask(method, absent, none, caller)
        if status == 404:
            assert lacking(held, ["view"]) is None, "it says what does not exist"
            continue
        gone = need if need.name is None else need._replace(name=names[need.name])
        assert (status, sentence(caller, gone) in html.unescape(page)) == (403, True), (caller, page)
    assert path in NOTHING_THERE or {200, 303} & set(permitted)
