"""A message that kills whoever takes it: it dies, and what lay behind it in the memory of its consumers does not.

The short form is TestUnreached in tests/ledger/groups/test_groups_rules.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import escrowmq as mq
import forked
from escrowmq_lab.servers.escrow import serving

CONSUMER = """
import os, sys
import escrowmq as mq
with mq.connect(sys.argv[1]) as bus, bus.consumer("cart", "orders", lease=0.3, prefetch=3) as consumer:
    for message in consumer.messages(idle_timeout=0.5):
        if message.body == b"kills":
            consumer.flush()
            os._exit(7)
        message.ack()
"""


@pytest.mark.invariant("I25")
@pytest.mark.long
def test_a_message_that_kills_its_consumers_is_the_only_dead_letter(tmp_path: Path) -> None:
    options = ("--default-queues", "1", "--max-attempts", "2", "--retry-backoff", "0")
    with serving(tmp_path, *options, launcher=forked.Forked) as server, mq.connect(url := server.url) as bus:
        bus.consumer("cart", "orders").close()
        bodies = [b"good"] * 5 + [b"kills"] + [b"good"] * 1500
        bus.producer("shop").send_batch([mq.Message("orders", body) for body in bodies]).check()
        deaths = 0
        while not bus.admin.dead_letters("cart"):
            process = forked.run([sys.executable, "-c", CONSUMER, url])
            deaths += process.returncode == 7
            assert process.returncode in (0, 7)
        assert deaths >= 2
        assert forked.run([sys.executable, "-c", CONSUMER, url]).returncode == 0
        (letter,) = bus.admin.dead_letters("cart")
        assert letter["offset"] == 5
        (group,) = bus.admin.groups()
        assert sum(queue["acked"] for queue in group["queues"]) == len(bodies) - 1
