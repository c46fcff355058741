"""What programs do to a broker while it is disturbed: each workload as roles whose every call goes into a history.

A workload does not know what it runs on: :class:`~.seam.Site` gives it a bus, time and chance. The simulation gives
simulated ones; a run with real processes gives real ones.
"""

from escrowmq_lab.workloads.copying import CopyTopic
from escrowmq_lab.workloads.drain import AppendAndDrain, EarlyRead
from escrowmq_lab.workloads.ledgers import Bank
from escrowmq_lab.workloads.operating import Operator
from escrowmq_lab.workloads.pair import OutboxPair
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload
from escrowmq_lab.workloads.storm import CheckBackStorm, Zombie

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
