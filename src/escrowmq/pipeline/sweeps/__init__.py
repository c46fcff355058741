"""Sweeps over sharded databases: settle paid or expired orders, and release stock frozen without an order."""

from escrowmq.pipeline.sweeps.acts import Act, Inconsistent, release, release_orphan, settle_order
from escrowmq.pipeline.sweeps.books import Books
from escrowmq.pipeline.sweeps.databases import Databases
from escrowmq.pipeline.sweeps.run import Swept, sweep_freezes, sweep_orders

__all__ = [
    "Act",
    "Books",
    "Databases",
    "Inconsistent",
    "Swept",
    "release",
    "release_orphan",
    "settle_order",
    "sweep_freezes",
    "sweep_orders",
]
