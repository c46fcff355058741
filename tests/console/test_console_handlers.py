"""A poison message of a handler, from its traceback in the console to its redelivery."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import console_world
from console_visitor import Visitor
from test_console_plans import new_plan, run_of

import escrowmq as mq
from escrowmq.handlers import App


def test_a_poison_message_is_redelivered_from_the_console(open_console: Callable[..., Visitor], tmp_path: Path) -> None:
    app, is_poison = App(), [True]

    @app.handler("orders", group="cart")
    def swallow(body: str) -> None:
        if is_poison[0]:
            raise ValueError("hemlock")

    with console_world.served_broker(tmp_path / "data", max_attempts=1) as url, mq.connect(url) as bus:
        bus.producer("p").send("orders", b"x")
        assert [one.outcome for one in app.run_available(bus)] == ["dead"]
        visitor = open_console(url)
        page = visitor.get("/dead-letters/cart")
        assert "ValueError: hemlock" in page
        assert "in swallow" in page
        is_poison[0] = False
        path = new_plan(visitor, act="dead_letters.retry", group="cart")
        assert '<span class="state finished">finished</span>' in run_of(visitor, path)
        assert [one.outcome for one in app.run_available(bus)] == ["acked"]
        assert bus.admin.dead_letters("cart") == []
