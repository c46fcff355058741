"""All pages: path, methods, view; and the entries of the menu."""

from __future__ import annotations

from collections.abc import Callable

from escrowmq.console.asked import Answer, Params
from escrowmq.console.core import Console
from escrowmq.console.views import (
    acts,
    databases,
    dead_letters,
    find,
    groups,
    messages,
    overview,
    plans,
    producers,
    topics,
    transactions,
    waiting,
)
from escrowmq.console.views.changing import dead_letters as changing_letters
from escrowmq.console.views.changing import groups as changing_groups
from escrowmq.console.views.changing import producers as changing_producers
from escrowmq.console.views.changing import topics as changing_topics

View = Callable[[Console, Params], Answer]

VIEWS: list[tuple[str, list[str], View]] = [
    ("/", ["GET"], overview.overview),
    ("/find", ["GET"], find.find),
    ("/waiting", ["GET"], waiting.waiting),
    ("/topics", ["GET"], topics.topics),
    ("/topics/{topic}", ["GET"], topics.topic),
    ("/topics/{topic}/alter", ["POST"], changing_topics.alter),
    ("/topics/{topic}/delete", ["GET"], changing_topics.preview),
    ("/topics/{topic}/delete", ["POST"], changing_topics.delete),
    ("/topics/{topic}/message", ["GET"], messages.message),
    ("/topics/{topic}/body", ["GET"], messages.body),
    ("/groups", ["GET"], groups.groups),
    ("/groups/{group}", ["GET"], groups.group),
    ("/groups/{group}/pause", ["POST"], changing_groups.pause),
    ("/groups/{group}/resume", ["POST"], changing_groups.resume),
    ("/groups/{group}/fence", ["POST"], changing_groups.fence),
    ("/groups/{group}/reset", ["GET"], changing_groups.preview),
    ("/groups/{group}/reset", ["POST"], changing_groups.reset),
    ("/groups/{group}/delete", ["POST"], changing_groups.delete),
    ("/producers", ["GET"], producers.producers),
    ("/producers/{group}/alter", ["GET"], changing_producers.show),
    ("/producers/{group}/alter", ["POST"], changing_producers.alter),
    ("/transactions", ["GET"], transactions.transactions),
    ("/transactions/{id}", ["GET"], transactions.transaction),
    ("/dead-letters", ["GET"], dead_letters.groups),
    ("/dead-letters/{group}", ["GET"], dead_letters.letters),
    ("/dead-letters/{group}/retry", ["POST"], changing_letters.retry),
    ("/dead-letters/{group}/letter", ["GET"], dead_letters.letter),
    ("/dead-letters/{group}/edit", ["GET"], changing_letters.form),
    ("/dead-letters/{group}/edit", ["POST"], changing_letters.edit),
    ("/databases", ["GET"], databases.databases),
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
    ("/databases", "Databases", "b", ""),
    ("/plans", "Plans", "p", "By hand"),
    ("/acts", "Acts", "a", ""),
]
"""The menu: path, name, the key after ``g``, and a heading above it."""
