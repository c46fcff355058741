"""The delivery modes of the product, each as what a producer and a consumer of it do. A mode's name is its word on the command line."""

from escrowmq.chaos.modes.barrier import BarrierMode
from escrowmq.chaos.modes.both_reach import BothReachMode
from escrowmq.chaos.modes.compensating import CompensatingMode
from escrowmq.chaos.modes.compensation import CompensationMode
from escrowmq.chaos.modes.driven import DrivenMode
from escrowmq.chaos.modes.groups import GroupsMode
from escrowmq.chaos.modes.offsets import OffsetsMode
from escrowmq.chaos.modes.outbox import OutboxMode
from escrowmq.chaos.modes.seam import Mode, Site
from escrowmq.chaos.modes.spark_sink import SparkSinkMode

MODES: dict[str, type[Mode]] = {
    mode.name: mode
    for mode in (
        BarrierMode,
        OutboxMode,
        OffsetsMode,
        GroupsMode,
        DrivenMode,
        BothReachMode,
        CompensatingMode,
        CompensationMode,
        SparkSinkMode,
    )
}

__all__ = ["MODES", "Mode", "Site"]
