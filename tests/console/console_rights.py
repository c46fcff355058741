"""A served broker with a rights file, a console over it, and addresses and forms for every page of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from console_visitor import Visitor
from console_world import fail_all
from guarded_broker import RightsFile

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.console import ConsoleSettings, beside
from escrowmq.console.views.table import VIEWS

SETTINGS = ConsoleSettings(sample_seconds=0.1, call_timeout=60.0, page_timeout=120.0)
GROUP, TOPIC, SECRET = "cart", "orders", "order-secret"
"""``SECRET`` is the key of each message: a page without a session must not contain it."""


class World:
    """A served broker with a rights file, with dead letters, an open transaction, and plans."""

    def __init__(self, url: str, rights: RightsFile, folder: Path) -> None:
        self.url, self.rights, self.plans = url, rights, folder / "plans"
        self.broker = links(url, {})[0].address

    def bus(self, principal: str) -> mq.Bus:
        return mq.connect(self.url, token=self.rights.tokens[principal])

    def fill(self) -> None:
        with self.bus("boss") as bus:
            bus.admin.create_topic(TOPIC, queues=1)
            shop = bus.producer("shop")
            for number in range(4):
                shop.send(TOPIC, b"{}", key=f"{SECRET}-{number}")
            transaction = bus.producer("pay", unasked=True).transaction()
            transaction.send(TOPIC, b"{}", key=SECRET)
            fail_all(bus, GROUP, TOPIC, {}, 3)
            self.letter = dict(bus.admin.dead_letters(GROUP)[0])
            self.transaction = str(bus.admin.transactions(state="open")[0]["id"])

    def have_letters(self) -> None:
        """See that the group has a dead letter: an earlier test may have taken them away, or have paused the group."""
        with self.bus("boss") as bus:
            if not bus.admin.dead_letters(GROUP):
                bus.admin.resume_group(GROUP)
                bus.producer("shop").send(TOPIC, b"{}", key=SECRET)
                fail_all(bus, GROUP, TOPIC, {}, 1)
            self.letter = dict(bus.admin.dead_letters(GROUP)[0])

    def connect(self, token: str | None) -> Any:
        return links(self.url, {"token": token or ""})

    @contextmanager
    def console(self, settings: ConsoleSettings = SETTINGS, **options: Any) -> Iterator[str]:
        options = {"rights": True, "plans": self.plans, **options}
        with beside(self.connect, listen="127.0.0.1:0", settings=settings, **options) as at:
            yield at["console"]


def principals(folder: Path) -> RightsFile:
    rights = RightsFile(folder)
    rights.add("boss", "send *", "produce *", "consume *", "read *", "act *", "view", "admin")
    rights.add("ops", "read *", "view", "act *")
    rights.add("reader", "read *", "view")
    rights.add("clerk", "read *", "view", f"act {GROUP}")
    rights.add("shop", "send *", "produce shop")
    return rights


def log_in(visitor: Visitor, token: str, status: int = 303, **form: str) -> str:
    visitor.get("/login")
    return visitor.post("/login", status, access_token=token, **form)


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def address_of(path: str, world: World, plan: str = "20260101-000000-000000") -> str:
    """An address of a page of the table; one without a sample here fails."""
    letter = {name: world.letter[name] for name in ("topic", "queue", "offset")}
    places = {"topic": TOPIC, "group": "shop" if path.startswith("/producers") else GROUP, "number": "1"}
    if path.startswith("/transactions"):
        places["id"] = world.transaction
    elif path.startswith("/plans"):
        places["id"] = plan
    elif path.startswith("/work"):
        places["id"] = "0" * 16
    query = {"/find": {"q": SECRET}, "/topics/{topic}/message": {"offset": 0}, "/topics/{topic}/body": {"offset": 0}}
    query |= {f"/dead-letters/{{group}}/{name}": letter for name in ("letter", "edit")}
    made = path.format(**places)
    return f"{made}?{urlencode(query[path])}" if path in query else made


def form_of(path: str, world: World, digest: str = "") -> dict[str, Any]:
    """A sound form for a page that changes something."""
    letter = world.letter
    typed = {"why": "a test", "typed": GROUP}
    return {
        "/topics/{topic}/alter": {"queues": 2, "why": "a test"},
        "/topics/{topic}/delete": {"why": "a test", "typed": TOPIC},
        "/groups/{group}/pause": typed,
        "/groups/{group}/resume": typed,
        "/groups/{group}/fence": {"instance": "one", "typed": "one", "why": "a test"},
        "/groups/{group}/reset": {**typed, "places": json.dumps({world.broker: [[TOPIC, 0, 4]]})},
        "/groups/{group}/delete": typed,
        "/producers/{group}/alter": {"check_max": 3, "why": "a test"},
        "/dead-letters/{group}/edit": {
            **{name: letter[name] for name in ("topic", "queue", "offset", "dead_us", "attempts")},
            **{"broker": world.broker, "new_id": "ab" * 16, "why": "a test"},
        },
        "/dead-letters/{group}/retry": {"letter": json.dumps(dict(letter)), "why": "a test"},
        "/plans": {"act": "dead_letters.retry", "group": GROUP, "why": "a test"},
        "/plans/{id}/dry-run": {},
        "/plans/{id}/run": {"digest": digest},
        "/plans/{id}/stop": {},
        "/plans/{id}/delete": {},
    }[path]


def plan_by(visitor: Visitor, **fields: str) -> tuple[str, str]:
    """A new plan: its id and digest."""
    visitor.get("/plans/new")
    path = visitor.post("/plans", **{"act": "dead_letters.retry", "group": GROUP, "why": "a test", **fields})
    while path.startswith("/work/"):  # it is made in the background once that takes long
        path = visitor.http.get(path).headers.get("location", path)
    found = re.search(r'name="digest" value="([0-9a-f]+)"', visitor.get(path))
    assert found
    return path.rpartition("/")[2], found[1]


GETS = [path for path, methods, _ in VIEWS if "GET" in methods]
POSTS = [path for path, methods, _ in VIEWS if "POST" in methods]
