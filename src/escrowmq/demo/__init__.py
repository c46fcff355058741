"""The demonstration: a shop, a cart service and a points service, killed again and again, and the audit's verdict."""

from escrowmq.demo.director import DemoOptions, run

__all__ = ["DemoOptions", "run"]
