"""Renders operator actions for clients (same form from broker and database), and finds the current operator."""

from __future__ import annotations

import getpass
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from escrowmq.acts.chain import Break
from escrowmq.acts.journal import Listed
from escrowmq.wire.actions.acts import Act, Broken

_acting: ContextVar[str | None] = ContextVar("acting", default=None)


@contextmanager
def acting_as(principal: str | None) -> Iterator[None]:
    """Record the operator actions of this block under an authenticated principal; None: under the system's user."""
    token = _acting.set(principal)
    try:
        yield
    finally:
        _acting.reset(token)


def acting_user() -> str:
    """Return the principal of :func:`acting_as`, or else user and host from the operating system, unverified."""
    if (principal := _acting.get()) is not None:
        return principal
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user number without a name
        user = str(os.getuid()) if hasattr(os, "getuid") else "somebody"
    return f"{user}@{socket.gethostname()}"


def results(codes: Sequence[str]) -> dict[str, Any]:
    """Return the recorded outcome of an act on many items: the code of each, or only one code if all are equal."""
    kinds = Counter(codes)
    return {"results": dict(kinds)} if len(kinds) < 2 else {"results": dict(kinds), "each": list(codes)}


def to_act(one: Listed) -> Act:
    """Convert an act with its outcome."""
    begun, ended = one.begun, one.ended
    act = Act(
        number=begun.number, time_us=begun.at_us, act=begun.act or "", by=begun.by, why=begun.why, what=begun.what,
        hash=one.hash,
    )  # fmt: skip
    if ended is not None:
        act |= {"ended_us": ended.at_us, "ended": ended.ended or {}}
    return act


def describe_outcome(act: Mapping[str, Any], shortly: Callable[[Mapping[str, Any]], str]) -> str:
    """Describe the outcome of an act; ``shortly`` describes an end without results."""
    ended = act.get("ended")
    if ended is None:
        return "in progress"
    if "refused" in ended:
        return f"refused: {ended['refused']}"
    if "interrupted" in ended:
        found = ended["found"]
        seen = _counts(found["results"]) if isinstance(found, dict) and "results" in found else found
        return f"the broker stopped meanwhile; found: {seen}"
    return _counts(ended["results"]) if "results" in ended else shortly(ended)


def _counts(results: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {code}" for code, count in results.items())


def to_broken(breaks: Iterable[Break]) -> list[Broken]:
    """Convert the places where a chain is broken."""
    return [
        Broken(line=one.line, what=one.what) | ({} if one.number is None else {"number": one.number}) for one in breaks
    ]
