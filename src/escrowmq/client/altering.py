"""Settings of a group that operators can change, and the requests that change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, cast

from escrowmq.acts.telling import acting_user
from escrowmq.client.consuming.options import redelivery_request, start_text, tag_list
from escrowmq.errors import Code, Misuse
from escrowmq.settings import nearest
from escrowmq.wire.actions import groups, producers, topics
from escrowmq.wire.actions.action import Request
from escrowmq.wire.actions.producers import ExhaustedName, KindName, RuleName


class GroupChanges(TypedDict, total=False):
    """New settings of a consumer group. What is not given, or None, stays as it is."""

    topics: str | Sequence[str] | None
    tags: str | Sequence[str] | None
    ordered: bool | None
    in_doubt: Literal["redeliver", "hold"] | None
    start: str | datetime | None
    max_attempts: int | None
    retry_backoff: float | None
    retry_backoff_max: float | None
    redelivery: str | Sequence[float] | None


class ProducersChanges(TypedDict, total=False):
    """New settings of a producer group. What is not given, or None, stays as it is."""

    kind: KindName | None
    transaction_timeout: float | None
    check_interval: float | None
    check_max: int | None
    checks_exhausted: ExhaustedName | None
    reset: Sequence[RuleName]


def group_request(group: str, changes: GroupChanges) -> groups.Alter:
    """Build the request ``groups.alter`` from new settings of a consumer group. Raises Misuse(BAD_ARGUMENT) for an
    unknown or invalid one."""
    _refuse_others(changes, GroupChanges)
    topics, tags, start = changes.get("topics"), changes.get("tags"), changes.get("start")
    redelivery = changes.get("redelivery")
    default = redelivery in ("broker", "forever")
    if redelivery == "forever" and changes.get("max_attempts") is not None:
        raise Misuse(Code.BAD_ARGUMENT, 'redelivery="forever" with max_attempts', "give one of them")
    request = {
        **changes,
        **({} if redelivery == "broker" else redelivery_request(redelivery)),
        "group": group,
        "topics": [topics] if isinstance(topics, str) else topics and list(topics),
        "tags": None if tags is None else tag_list(tags),
        "start": None if start is None else start_text(start),
        "redelivery": None,
        "default_redelivery": default or None,
    }
    return cast(groups.Alter, {name: value for name, value in request.items() if value is not None})


class TopicChanges(TypedDict, total=False):
    """Settings of a topic. What is not given, or None, stays; ``"broker"``: the broker's own setting."""

    queues: int | None
    retention: float | Literal["broker"] | None
    retention_size: int | Literal["broker"] | None


def topic_request(name: str, changes: TopicChanges) -> topics.Alter:
    """Build the request ``topics.alter`` from new settings of a topic. Raises Misuse(BAD_ARGUMENT) for an unknown or
    invalid one."""
    _refuse_others(changes, TopicChanges)
    given = {rule: value for rule, value in changes.items() if value is not None}
    reset = [rule for rule in ("retention", "retention_size") if given.get(rule) == "broker"]
    request = {rule: value for rule, value in given.items() if rule not in reset}
    for rule, value in request.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Misuse(Code.BAD_ARGUMENT, f"{rule} = {value!r:.100} is no number", "or 'broker': as its settings say")
    return cast(topics.Alter, {"name": name, **request, **({"reset": reset} if reset else {})})


def producers_request(group: str, changes: ProducersChanges) -> producers.Alter:
    """Build the request ``producers.alter`` from new settings of a producer group. Raises Misuse(BAD_ARGUMENT) for an
    unknown one."""
    _refuse_others(changes, ProducersChanges)
    request = {**changes, "group": group, "reset": list(changes.get("reset") or ()) or None}
    return cast(producers.Alter, {name: value for name, value in request.items() if value is not None})


def limit_words(group: Mapping[str, Any]) -> str:
    """Return the ``limits`` of a listed consumer group as text; empty if it has none, or the broker is of an older
    version."""
    units = {"rate": "messages per second", "in_flight": "in flight", "in_flight_per_key": "in flight per key"}
    limits = group.get("limits", {})
    return ", ".join(f"{limits[name]:,.15g} {unit}" for name, unit in units.items() if name in limits)


def signed(request: Request, why: str | None) -> Request:
    """Return a copy of an operator's request with ``by`` (user and host, as the operating system names them) and
    ``why``."""
    return cast(Request, {**request, "by": acting_user(), **({} if why is None else {"why": why})})


def _refuse_others(changes: Mapping[str, object], shape: type) -> None:
    """Raise Misuse(BAD_ARGUMENT) for a name in ``changes`` that ``shape`` does not have: it must not be ignored
    silently."""
    known = list(shape.__annotations__)
    if unknown := [name for name in changes if name not in known]:
        raise Misuse(Code.BAD_ARGUMENT, f"{unknown[0]!r} is nothing that can be altered", nearest(unknown[0], known))
