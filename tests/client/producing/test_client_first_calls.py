"""The first calls of a producer leave in the order in which they were made, though the first one opens the session."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import escrowmq as mq


@pytest.mark.invariant("I20")
async def test_a_call_made_while_the_session_has_just_opened_does_not_pass_the_first_one(tmp_path: Path) -> None:
    async with await mq.aconnect(f"file:{tmp_path}") as bus:
        await bus.producer("other").send("t", b"", key="k")  # the topic and its queues are there
        producer = bus.producer("p")
        first = asyncio.create_task(producer.send("t", b"1", key="k"))
        await asyncio.sleep(0)  # it begins to open the session, on a thread
        session = producer._production.sessions[0]
        while not session.ready(False):
            time.sleep(0.001)  # the loop stands still: the session is open, and the first call does not know
        others = [asyncio.create_task(producer.send("t", b"%d" % n, key="k")) for n in range(2, 6)]
        receipts = await asyncio.gather(first, *others)
    assert [receipt.offset for receipt in receipts] == [1, 2, 3, 4, 5]
