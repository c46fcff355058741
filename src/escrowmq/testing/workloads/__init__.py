"""What programs do to a broker while it is disturbed: each workload as roles whose every call goes into a history.

A workload does not know what it runs on: :class:`~.seam.Site` gives it a bus, time and chance. The simulation gives simulated ones; a
run with real processes gives real ones.
"""

from escrowmq.testing.workloads.copying import CopyTopic
from escrowmq.testing.workloads.drain import AppendAndDrain, EarlyRead
from escrowmq.testing.workloads.ledgers import Bank
from escrowmq.testing.workloads.operating import Operator
from escrowmq.testing.workloads.pair import OutboxPair
from escrowmq.testing.workloads.seam import Operation, Role, Site, Workload
from escrowmq.testing.workloads.storm import CheckBackStorm, Zombie

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        AppendAndDrain(),
        EarlyRead(),
        Bank(),
        CopyTopic(),
        CheckBackStorm(),
        Zombie(),
        OutboxPair(),
        Operator(),
    )
}
"""All of them, by name."""

__all__ = ["WORKLOADS", "Operation", "Role", "Site", "Workload"]
