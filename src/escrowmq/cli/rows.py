"""Messages, decisions and acknowledgements as JSON and as lines: printed ids, microseconds, text bodies."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from rich.text import Text

from escrowmq.cli.printing import body_text, cell, moment
from escrowmq.model import DecidedBy, TransactionId, TransactionState


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row, from Arrow or from the admin interface, to JSON values. ``message_id`` is 32 hexadecimal digits
    and ``transaction`` the printed id. ``body`` is the text; a body that is not UTF-8 has ``body`` null and
    ``body_base64`` in addition."""
    made: dict[str, Any] = {}
    for name, value in row.items():
        if name == "properties":
            made[name] = dict(value or {})
        elif name == "body" and isinstance(value, bytes):
            try:
                made[name] = value.decode()
            except UnicodeDecodeError:
                made |= {name: None, "body_base64": base64.b64encode(value).decode()}
        elif isinstance(value, bytes):
            made[name] = str(TransactionId.from_bytes(value)) if name == "transaction" else value.hex()
        elif isinstance(value, int) and name in _ENUMS:
            made[name] = _ENUMS[name](value).name.lower()
        else:
            made[name] = value
    return made


_ENUMS: dict[str, type[IntEnum]] = {"state": TransactionState, "decided_by": DecidedBy}


def body_of(message: Mapping[str, Any], most: int) -> str:
    """Return the body of a :func:`plain` message, cut at ``most`` characters."""
    if message.get("damaged"):
        return f"(damaged: {message['damaged']})"
    if message["body"] is None:
        return "(withheld)" if message.get("withheld") else "(binary)"
    return body_text(message["body"].encode(), most)


def message_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one message on one line: position, time, key, tag, body."""
    named = [(f"{name}={cell(row[name])}", "cyan") for name in ("key", "tag") if row.get(name) is not None]
    if row.get("damaged"):
        return _line(where, row.get("stored_us"), *named, (f"damaged: {row['damaged']}", "red"))
    return _line(where, row.get("stored_us"), *named, (cell(body_text(row["body"])).plain, ""))


def half_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one half message on one line: position, transaction and state, then the message."""
    state = TransactionState(row["state"]).name.lower()
    transaction = str(TransactionId.from_bytes(row["transaction"])) if row["transaction"] else "unknown"
    checks = f"checks={row['checks']}" if row["checks"] else ""
    line = _line(where, None, (transaction, ""), (state, "yellow"), (checks, ""), (row["topic"] or "", "bold"))
    return line + Text(" ") + message_line(row, "")


def op_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one decision on one line: position, transaction, result, decider."""
    if row.get("damaged"):
        return _line(where, row["decided_us"], (f"damaged: {row['damaged']}", "red"))
    transaction, state = str(TransactionId.from_bytes(row["transaction"])), TransactionState(row["state"]).name.lower()
    by, half = f"by {DecidedBy(row['decided_by']).name.lower()}", f"half={row['half_position']}"
    return _line(where, row["decided_us"], (transaction, ""), (state, "green"), (by, ""), (half, "dim"))


def ack_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one acknowledgement on one line: position, time, group, queue and offsets."""
    if row.get("damaged"):
        return _line(where, row["acked_us"], (f"damaged: {row['damaged']}", "red"))
    known = row["group"] is not None
    offsets = f"{row['start']}" if row["count"] == 1 else f"{row['start']}..{row['start'] + row['count'] - 1}"
    return _line(
        where,
        row["acked_us"],
        (row["group"] if known else "group unknown", "green"),
        (f"{row['topic']}/{row['queue']}" if known else "", "bold"),
        (offsets, ""),
        (f"attempt={row['attempt']}" if known else "", ""),
        (f"lease={row['lease']}", "dim"),
    )


def group_act_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one operator action on a group's message on one line: position, time, group, action, message."""
    if row.get("damaged"):
        return _line(where, row["acted_us"], (f"damaged: {row['damaged']}", "red"))
    instead = f"instead={row['message_id'].hex()}" if row["message_id"] else ""
    place = f"{row['topic']}/{row['queue']}/{row['offset']}"
    group, act = (row["group"] or "group unknown", "green"), (row["act"], "yellow")
    return _line(where, row["acted_us"], group, act, (place, "bold"), (instead, "dim"))


def _line(where: str, time_us: int | None, *parts: tuple[str, str]) -> Text:
    every = [(where, "bold"), (moment(time_us) or "", "dim"), *parts]
    return Text(" ").join(Text(text, style) for text, style in every if text)
