"""Messages, decisions and acknowledgements as JSON and as lines: printed ids, microseconds, text bodies."""

from __future__ import annotations

import base64
from collections.abc import Mapping
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
        if name == "transaction" and isinstance(value, bytes):
            made[name] = str(TransactionId.from_bytes(value))
        elif name == "properties":
            made[name] = dict(value) if value else {}
        elif name == "state" and isinstance(value, int):
            made[name] = TransactionState(value).name.lower()
        elif name == "decided_by" and isinstance(value, int):
            made[name] = DecidedBy(value).name.lower()
        elif name == "body" and isinstance(value, bytes):
            made.update(_body(value))
        else:
            made[name] = value.hex() if isinstance(value, bytes) else value
    return made


def _body(body: bytes) -> dict[str, str | None]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body": None, "body_base64": base64.b64encode(body).decode()}


def body_of(message: Mapping[str, Any], most: int) -> str:
    """Return the body of a :func:`plain` message, cut at ``most`` characters."""
    if message.get("damaged"):
        return f"(damaged: {message['damaged']})"
    if message["body"] is None:
        return "(withheld)" if message.get("withheld") else "(binary)"
    return body_text(message["body"].encode(), most)


def message_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one message on one line: position, time, key, tag, body."""
    parts = [(where, "bold"), (moment(row.get("stored_us")) or "", "dim")]
    parts += [(f"{name}={cell(row[name])}", "cyan") for name in ("key", "tag") if row.get(name) is not None]
    if row.get("damaged"):
        return _line([*parts, (f"damaged: {row['damaged']}", "red")])
    return _line([*parts, (cell(body_text(row["body"])).plain, "")])


def half_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one half message on one line: position, transaction and state, then the message."""
    state = TransactionState(row["state"]).name.lower()
    transaction = str(TransactionId.from_bytes(row["transaction"])) if row["transaction"] else "unknown"
    checks = f"checks={row['checks']}" if row["checks"] else ""
    return (
        _line([(where, "bold"), (transaction, ""), (state, "yellow"), (checks, ""), (row["topic"] or "", "bold")])
        + Text(" ")
        + message_line(row, "")
    )


def op_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one decision on one line: position, transaction, result, decider."""
    if row.get("damaged"):
        return _damaged_line(row, where, "decided_us")
    return _line(
        [
            (where, "bold"),
            (moment(row["decided_us"]) or "", "dim"),
            (str(TransactionId.from_bytes(row["transaction"])), ""),
            (TransactionState(row["state"]).name.lower(), "green"),
            (f"by {DecidedBy(row['decided_by']).name.lower()}", ""),
            (f"half={row['half_position']}", "dim"),
        ]
    )


def ack_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one acknowledgement on one line: position, time, group, queue and offsets."""
    if row.get("damaged"):
        return _damaged_line(row, where, "acked_us")
    last = row["start"] + row["count"] - 1
    unknown = row["group"] is None
    return _line(
        [
            (where, "bold"),
            (moment(row["acked_us"]) or "", "dim"),
            ("group unknown" if unknown else row["group"], "green"),
            ("" if unknown else f"{row['topic']}/{row['queue']}", "bold"),
            (f"{row['start']}" if row["count"] == 1 else f"{row['start']}..{last}", ""),
            ("" if unknown else f"attempt={row['attempt']}", ""),
            (f"lease={row['lease']}", "dim"),
        ]
    )


def group_act_line(row: Mapping[str, Any], where: str) -> Text:
    """Format one operator action on a group's message on one line: position, time, group, action, message."""
    if row.get("damaged"):
        return _damaged_line(row, where, "acted_us")
    instead = f"instead={row['message_id'].hex()}" if row["message_id"] else ""
    return _line(
        [
            (where, "bold"),
            (moment(row["acted_us"]) or "", "dim"),
            (row["group"] or "group unknown", "green"),
            (row["act"], "yellow"),
            (f"{row['topic']}/{row['queue']}/{row['offset']}", "bold"),
            (instead, "dim"),
        ]
    )


def _damaged_line(row: Mapping[str, Any], where: str, when: str) -> Text:
    return _line([(where, "bold"), (moment(row[when]) or "", "dim"), (f"damaged: {row['damaged']}", "red")])


def _line(parts: list[tuple[str, str]]) -> Text:
    return Text(" ").join(Text(text, style) for text, style in parts if text)
