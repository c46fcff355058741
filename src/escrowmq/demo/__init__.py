"""The demonstration: a shop, a cart service and a points service, killed again and again, and the audit's verdict."""

from escrowmq.demo.director import run
from escrowmq.demo.options import DemoOptions

__all__ = ["DemoOptions", "run"]
