"""Access rights of a broker without a rights file; with one ``broker/guarded.py`` answers."""

from __future__ import annotations

from escrowmq.broker.actions.answering import answers
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.wire.actions import rights
from escrowmq.wire.actions.action import Nothing


@answers(rights.WHOAMI)
def _whoami(_: Readable, __: Nothing) -> rights.WhoAmI:
    return {"principal": None, "rules": []}


@answers(rights.DENIALS)
def _denials(_: Readable, __: Nothing) -> rights.Denials:
    return {"denials": [], "unauthenticated": 0}


@answers(rights.RELOAD)
def _reload(_: Engine, __: rights.Reload) -> rights.Reloaded:
    raise error(Code.BAD_REQUEST, "this broker has no rights file", "start it with serve --rights FILE")
