"""Webhooks for parked transactions, dead letters, full disks and other events, with configured thresholds."""

from escrowmq.gateway.webhooks.configured import Hook, read_hooks
from escrowmq.gateway.webhooks.posting import Webhooks
from escrowmq.gateway.webhooks.rules import KINDS, Notice, Rule, Window

__all__ = ["KINDS", "Hook", "Notice", "Rule", "Webhooks", "Window", "read_hooks"]
