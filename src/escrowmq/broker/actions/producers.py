"""Producer groups and their sessions."""

from __future__ import annotations

from typing import Any, cast

from escrowmq.broker.actions.answering import answers, microseconds, submits
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.recording import recorded
from escrowmq.broker.writer.engine import Engine
from escrowmq.ledger.commands import AlterProducers, OpenSession, ProducerRules
from escrowmq.ledger.listings import producers_list
from escrowmq.ledger.transactions import policies
from escrowmq.wire.actions import producers
from escrowmq.wire.actions.action import Nothing


def _rules(request: producers.CheckRules, kind: str | None = None) -> ProducerRules:
    exhausted = request.get("checks_exhausted")
    return ProducerRules(
        kind=kind,
        transaction_timeout_us=microseconds(request.get("transaction_timeout")),
        check_interval_us=microseconds(request.get("check_interval")),
        check_max=request.get("check_max"),
        exhausted_rollback=None if exhausted is None else exhausted == "rollback",
    )


@answers(producers.ALTER)
def _alter_producers(engine: Engine, request: producers.Alter) -> producers.Altered:
    fields = [policies.FIELDS[name] for name in request.get("reset", [])]
    command = AlterProducers(request["group"], _rules(request, request.get("kind")), fields)
    with recorded(engine, producers.ALTER, request) as done:
        has = policies.described_values(engine.submit(command).result())
        done.ended = {"group": request["group"]} | {k: v for k, v in has.items() if v is not None}
    return cast(producers.Altered, done.ended)


submits(
    producers.OPEN_SESSION,
    lambda request: OpenSession(
        request["group"],
        request["instance"],
        request.get("transactional", False),
        request.get("resume"),
        _rules(request["rules"]) if "rules" in request else None,
        request.get("process"),
    ),
    lambda session: {"session": session},
)


@answers(producers.LIST)
def _list_producers(engine: Readable, _: Nothing) -> producers.Producers:
    listed: list[Any] = engine.look(lambda: producers_list(engine.shard.ledger)).result()
    return {"producers": [group | {"members": engine.listeners.count(group["group"])} for group in listed]}
