"""The delivery modes, each as the work of a producer and a consumer; their names are those of the command line."""

import importlib

from escrowmq.errors import Code, Misuse
from escrowmq_lab.chaos.modes.barrier import BarrierMode
from escrowmq_lab.chaos.modes.both_reach import BothReachMode
from escrowmq_lab.chaos.modes.compensating import CompensatingMode
from escrowmq_lab.chaos.modes.compensation import CompensationMode
from escrowmq_lab.chaos.modes.driven import DrivenMode
from escrowmq_lab.chaos.modes.groups import GroupsMode
from escrowmq_lab.chaos.modes.offsets import OffsetsMode
from escrowmq_lab.chaos.modes.outbox import OutboxMode
from escrowmq_lab.chaos.modes.seam import Mode, Site
from escrowmq_lab.chaos.modes.spark_sink import SparkSinkMode

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


def mode_of(name: str) -> type[Mode]:
    """Return the mode of that name, or of a name such as ``package.module:Class`` for an external one.

    Raises Misuse(BAD_ARGUMENT) if there is none.
    """
    module, colon, kind = name.partition(":")
    try:
        return getattr(importlib.import_module(module), kind) if colon else MODES[name]
    except (ImportError, AttributeError, KeyError) as problem:
        hint = f"one of {', '.join(MODES)}"
        raise Misuse(Code.BAD_ARGUMENT, f"no such delivery mode: {name}", hint) from problem


__all__ = ["MODES", "Mode", "Site", "mode_of"]
