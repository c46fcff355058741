"""Workloads of programs against brokers under faults: each consists of roles whose calls are recorded in a history.

A workload does not depend on its environment: :class:`~.seam.Site` provides a bus, time and chance. The simulation
provides simulated ones; a run with real processes provides real ones.
"""

from escrowmq_lab.workloads.carrying import Carrying
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
        Carrying(),
    )
}
"""All workloads, by name."""

__all__ = ["WORKLOADS", "Operation", "Role", "Site", "Workload"]
