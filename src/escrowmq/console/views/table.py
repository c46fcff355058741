"""All pages: path, methods, view; and the rooms of the menu."""

from __future__ import annotations

from collections.abc import Callable

from escrowmq.console.asked import Answer, Asked
from escrowmq.console.core import Console
from escrowmq.console.views import (
    acts,
    dead_letters,
    find,
    group_acts,
    groups,
    messages,
    overview,
    plans,
    producers,
    topic_acts,
    topics,
    transactions,
    waiting,
)

View = Callable[[Console, Asked], Answer]

VIEWS: list[tuple[str, list[str], View]] = [
    ("/", ["GET"], overview.overview),
    ("/find", ["GET"], find.find),
    ("/waiting", ["GET"], waiting.waiting),
    ("/topics", ["GET"], topics.topics),
    ("/topics/{topic}", ["GET"], topics.topic),
    ("/topics/{topic}/alter", ["POST"], topic_acts.alter),
    ("/topics/{topic}/delete", ["GET"], topic_acts.look),
    ("/topics/{topic}/delete", ["POST"], topic_acts.delete),
    ("/topics/{topic}/message", ["GET"], messages.message),
    ("/topics/{topic}/body", ["GET"], messages.body),
    ("/groups", ["GET"], groups.groups),
    ("/groups/{group}", ["GET"], groups.group),
    ("/groups/{group}/pause", ["POST"], group_acts.pause),
    ("/groups/{group}/resume", ["POST"], group_acts.resume),
    ("/groups/{group}/fence", ["POST"], group_acts.fence),
    ("/groups/{group}/reset", ["GET"], group_acts.look),
    ("/groups/{group}/reset", ["POST"], group_acts.reset),
    ("/groups/{group}/delete", ["POST"], group_acts.delete),
    ("/producers", ["GET"], producers.producers),
    ("/transactions", ["GET"], transactions.transactions),
    ("/transactions/{id}", ["GET"], transactions.transaction),
    ("/dead-letters", ["GET"], dead_letters.groups),
    ("/dead-letters/{group}", ["GET"], dead_letters.letters),
    ("/dead-letters/{group}/letter", ["GET"], dead_letters.letter),
    ("/plans", ["GET"], plans.plans),
    ("/plans", ["POST"], plans.make),
    ("/plans/new", ["GET"], plans.new),
    ("/plans/{id}", ["GET"], plans.plan),
    ("/plans/{id}/rows", ["GET"], plans.rows),
    ("/plans/{id}/dry-run", ["POST"], plans.dry_run),
    ("/plans/{id}/run", ["POST"], plans.run),
    ("/plans/{id}/stop", ["POST"], plans.stop),
    ("/plans/{id}/delete", ["POST"], plans.delete),
    ("/work/{id}", ["GET"], plans.job),
    ("/acts", ["GET"], acts.acts),
    ("/acts/verify", ["GET"], acts.verify),
    ("/acts/{number}", ["GET"], acts.act),
]

ROOMS = [
    ("/", "Overview", "o", ""),
    ("/waiting", "What waits", "w", ""),
    ("/find", "Find", "f", ""),
    ("/topics", "Topics", "t", "Browse"),
    ("/groups", "Consumer groups", "c", ""),
    ("/producers", "Producer groups", "r", ""),
    ("/transactions", "Transactions", "x", ""),
    ("/dead-letters", "Dead letters", "d", ""),
    ("/plans", "Plans", "p", "By hand"),
    ("/acts", "Acts", "a", ""),
]
"""The menu: path, name, the key behind ``g``, and a heading above it."""
