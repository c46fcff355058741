"""Operator actions as clients see them, in the same form from a broker and a database; the current operator."""

from __future__ import annotations

import getpass
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from escrowmq.acts.chain import Break
from escrowmq.acts.journal import Listed
from escrowmq.wire.actions.acts import Act, Broken


def acting_user() -> str:
    """Return who acts: user and host, as the operating system names them. Nobody verifies it."""
    return f"{_user()}@{socket.gethostname()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user number without a name
        return str(os.getuid()) if hasattr(os, "getuid") else "somebody"


def results(codes: Sequence[str]) -> dict[str, Any]:
    """Summarize the results of an operation on many things: the code of each, or one code if all are equal."""
    kinds = Counter(codes)
    return {"results": dict(kinds)} if len(kinds) < 2 else {"results": dict(kinds), "each": list(codes)}


def told(one: Listed) -> Act:
    """Return an act with what came of it."""
    begun, ended = one.begun, one.ended
    act = Act(
        number=begun.number, time_us=begun.at_us, act=begun.act or "", by=begun.by, why=begun.why, what=begun.what,
        hash=one.hash,
    )  # fmt: skip
    if ended is not None:
        act |= {"ended_us": ended.at_us, "ended": ended.ended or {}}
    return act


def in_words(act: Mapping[str, Any], shortly: Callable[[Mapping[str, Any]], str]) -> str:
    """Describe the result of an operator action; ``shortly`` describes an end without results."""
    ended = act.get("ended")
    if ended is None:
        return "under way"
    if "refused" in ended:
        return f"refused: {ended['refused']}"
    if "interrupted" in ended:
        found = ended["found"]
        seen = _counts(found["results"]) if isinstance(found, dict) and "results" in found else found
        return f"the broker ended meanwhile; found: {seen}"
    return _counts(ended["results"]) if "results" in ended else shortly(ended)


def _counts(results: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {code}" for code, count in results.items())


def told_breaks(breaks: Iterable[Break]) -> list[Broken]:
    """Return the places where a chain is broken."""
    broken: list[Broken] = []
    for one in breaks:
        place = Broken(line=one.line, what=one.what)
        if one.number is not None:
            place["number"] = one.number
        broken.append(place)
    return broken
