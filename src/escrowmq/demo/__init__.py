"""The demonstration: a shop, a cart service and a points service, killed repeatedly, and the audit's verdict."""

from escrowmq.demo.director import DemoOptions
from escrowmq.demo.run import run

__all__ = ["DemoOptions", "run"]
