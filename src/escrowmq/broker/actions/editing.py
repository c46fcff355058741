"""Another message for a consumer group in place of a dead letter."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from escrowmq.broker.actions.answering import answers
from escrowmq.broker.recording import recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.ledger.commands import EditDead, Rules
from escrowmq.ledger.groups.dead.letters import NOT_DEAD
from escrowmq.message.columns import outgoing_batch
from escrowmq.message.limits import refusals
from escrowmq.message.names import EDITED_FROM
from escrowmq.wire.actions import dead_letters

MOST_WITHOUT = 100
"""Names that one edit may leave out."""


class _Seen(NamedTuple):
    """The place as it stood when it was looked at."""

    queue_id: int
    dead_us: int
    """NOT_DEAD: it is no dead letter, or another death than the one that was shown."""
    position: int
    """Of what the group was delivered; -1: it has left the log."""
    edited: bool
    """This very edit was done before."""
    rules: Rules


@answers(dead_letters.EDIT)
def _edit_dead_letter(engine: Engine, request: dead_letters.Edit) -> dead_letters.Edited:
    """Replace a dead letter by an edited message, for its group alone, as a recorded operator action. The ledger
    rejects it if the message died again since it was shown. A repeated request changes nothing."""
    identity = _identity(request["message_id"])
    seen: _Seen = engine.look(lambda: _look(engine, request, identity)).result()
    old = _read_stored(engine, seen.position)
    old_id = None if old is None else old["message_id"]
    batch = None if seen.edited else _batch(request, identity, old)
    about = {
        **{name: value for name, value in request.items() if name != "body_base64"},
        "dead_us": seen.dead_us,
        "edited_from": None if old_id is None else old_id.hex(),
    }
    if batch is not None:
        body = batch.column("body")[0].as_py()
        if refused := int(refusals(batch, seen.rules)[0]):  # before it is recorded: a record is no place for megabytes
            raise error(Code(refused))
        about |= {"body_bytes": len(body), "body_sha256": hashlib.sha256(body).hexdigest()}
    with recorded(engine, dead_letters.EDIT, about) as done:
        code = Code.ALREADY_EXISTS
        if batch is not None:
            command = EditDead(request["group"], seen.queue_id, request["offset"], seen.dead_us, batch)
            code = engine.submit(command).result()
        repeated = code == Code.ALREADY_EXISTS
        done.ended = {"repeated": True} if repeated else {"results": {"OK": 1}}
    if repeated and old is not None:
        old_id = _bytes(dict(old["properties"] or ()).get(EDITED_FROM))
    return {
        "message_id": identity.hex(),
        "edited_from": None if old_id is None else old_id.hex(),
        "repeated": repeated,
    }


def _look(engine: Engine, request: dead_letters.Edit, identity: bytes) -> _Seen:
    ledger, offset = engine.shard.ledger, request["offset"]
    queue_id = ledger.queue_id(request["topic"], request["queue"])
    cursor = ledger.groups.group(request["group"]).cursor(queue_id)
    at = np.array([offset], np.int64)
    position = int(cursor.edited.instead(at, ledger.queue(queue_id).positions_at(at))[0])
    edit, letter = cursor.edited.get(offset), cursor.dead.letter(offset)
    edited = edit is not None and edit.message_id == identity
    if letter is None:
        return _Seen(queue_id, NOT_DEAD, position, edited, ledger.rules)
    died_us, attempts, _ = letter
    shown = request.get("dead_us", died_us) == died_us and request.get("attempts", attempts) == attempts
    return _Seen(queue_id, died_us if shown else NOT_DEAD, position, edited, ledger.rules)


def _identity(text: str) -> bytes:
    identity = _bytes(text)
    if identity is None or len(identity) != 16:
        raise error(Code.BAD_REQUEST, f"{text!r:.100} is no message id", "32 hex digits")
    return identity


def _bytes(text: str | None) -> bytes | None:
    try:
        return bytes.fromhex(text or "") or None
    except ValueError:
        return None


def _read_stored(engine: Engine, position: int) -> dict[str, Any] | None:
    """Return the message at a log position by column: ``body`` is None if only that is lost. Returns None if the rest
    is lost, too, or has left the log."""
    if position < engine.log.first_position:
        return None
    stored, damaged = engine.log.salvage(np.array([position], np.int64))
    row: dict[str, Any] = stored.to_pylist()[0]
    if (damage := damaged.get(0)) is None:
        return row
    return {**row, "body": None} if damage.body_only else None


def _batch(request: dead_letters.Edit, identity: bytes, old: dict[str, Any] | None) -> pa.RecordBatch:
    body = _body(request)
    if body is None and (old is None or old["body"] is None):
        raise error(Code.DAMAGED, "the body cannot be read", "give a new one")
    without = set(request.get("without", ()))
    if len(without) > MOST_WITHOUT:
        raise error(Code.BAD_REQUEST, f"{len(without)} names to be left out; the limit is {MOST_WITHOUT}")
    properties = {**dict((old or {}).get("properties") or ()), **dict(request.get("properties", ()))}
    if old is not None:
        properties[EDITED_FROM] = old["message_id"].hex()
    pairs = [(name, value) for name, value in properties.items() if name not in without or name == EDITED_FROM]
    texts: dict[str, Any] = {
        name: None if name in without else request.get(name, (old or {}).get(name)) for name in ("key", "tag")
    }
    row = (
        request["topic"],
        old["body"] if body is None and old is not None else body,
        texts["key"],
        texts["tag"],
        pairs or None,
        identity,
        request["queue"],
        0 if old is None else old["born_us"],
        0,
        0,
        None,
    )
    return outgoing_batch([row], identity)


def _body(request: dead_letters.Edit) -> bytes | None:
    pieces = request.get("body_base64")
    if pieces is None:
        return None
    try:
        return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
    except (binascii.Error, ValueError):
        raise error(Code.BAD_REQUEST, "the body is not base64") from None
