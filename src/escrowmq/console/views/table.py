"""All pages: path, methods, view; and the rooms of the menu."""

from __future__ import annotations

from collections.abc import Callable

from escrowmq.console.asked import Answer, Asked
from escrowmq.console.core import Console
from escrowmq.console.views import acts, dead_letters, groups, messages, overview, producers, topics, transactions

View = Callable[[Console, Asked], Answer]

VIEWS: list[tuple[str, list[str], View]] = [
    ("/", ["GET"], overview.overview),
    ("/topics", ["GET"], topics.topics),
    ("/topics/{topic}", ["GET"], topics.topic),
    ("/topics/{topic}/message", ["GET"], messages.message),
    ("/topics/{topic}/body", ["GET"], messages.body),
    ("/groups", ["GET"], groups.groups),
    ("/groups/{group}", ["GET"], groups.group),
    ("/producers", ["GET"], producers.producers),
    ("/transactions", ["GET"], transactions.transactions),
    ("/transactions/{id}", ["GET"], transactions.transaction),
    ("/dead-letters", ["GET"], dead_letters.groups),
    ("/dead-letters/{group}", ["GET"], dead_letters.letters),
    ("/dead-letters/{group}/letter", ["GET"], dead_letters.letter),
    ("/acts", ["GET"], acts.acts),
    ("/acts/verify", ["GET"], acts.verify),
    ("/acts/{number}", ["GET"], acts.act),
]

ROOMS = [
    ("/", "Overview", "o", ""),
    ("/topics", "Topics", "t", "Browse"),
    ("/groups", "Consumer groups", "c", ""),
    ("/producers", "Producer groups", "r", ""),
    ("/transactions", "Transactions", "x", ""),
    ("/dead-letters", "Dead letters", "d", ""),
    ("/acts", "Acts", "a", "By hand"),
]
"""The menu: path, name, the key behind ``g``, and a heading above it."""
