"""More check-backs at once than wait in one stream all reach the client, in one round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rocketmq_runs import GatewayProcess, RawClient

from escrowmq.gateway.rocketmq.clients import MAX_COMMANDS
from escrowmq.gateway.rocketmq.protocol import definition
from escrowmq_lab.servers import escrow

COUNT = 3 * MAX_COMMANDS
RULES = ("--transaction-timeout", "5s", "--check-interval", "1h")
"""Time to send all of them; and a second round would come after an hour."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with escrow.serving(tmp_path, *RULES) as server:
        yield server.url


def test_each_of_many_due_checks_reaches_the_client(url: str, topic: str) -> None:
    with ExitStack() as stack:
        gateway = GatewayProcess(url, ())
        stack.callback(gateway.stop)
        client = RawClient(gateway.ready["rocketmq"])
        stack.callback(client.close)
        half = {"message_type": definition.TRANSACTION, "body_encoding": definition.IDENTITY}
        prepared = set()
        for _ in range(COUNT // 100):
            answer = client.send(*(client.message(topic, **half) for _ in range(100)))
            prepared |= {entry.transaction_id for entry in answer.entries}
        assert len(prepared) == COUNT
        checked = set()
        for command in client.telemetry(topic):
            if command.HasField("recover_orphaned_transaction_command"):
                checked.add(command.recover_orphaned_transaction_command.transaction_id)
                if len(checked) == COUNT:
                    break
        assert checked == prepared
