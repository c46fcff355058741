"""``escrowmq step-down``: a planned hand-over of a shard's leadership to another broker."""

from __future__ import annotations

from escrowmq.cli.options import Operation
from escrowmq.cli.printing import Columns, print_rows


def step_down(operation: Operation) -> None:
    """Make the leading broker hand over to a standby, for example before maintenance of its machine.

    It answers requests in flight and rejects new ones, which clients send to the new leader. It requires a log on Kafka
    (docs/failover.md). The broker continues as a standby. If no other broker takes over, it leads again after some
    seconds.
    """
    with operation.admin() as admin:
        found = admin.step_down(why=operation.why)
    columns: Columns = {
        "broker": "broker",
        "leads now": lambda row: row.get("leader", "none"),
        ">seconds": lambda row: f"{row['seconds']:.2f}",
    }
    print_rows(found, operation.json, columns, "no broker")
