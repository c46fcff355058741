"""The calls of one authenticated connection: each is checked against the caller's rights, then passed on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.failures import answer, broker_failed
from escrowmq.broker.reads.deliveries import Allowance
from escrowmq.broker.requests import check_schema, checked, transaction_id
from escrowmq.broker.writer.checkback import Listener
from escrowmq.errors import Code, Overloaded, error
from escrowmq.message.row import row_size
from escrowmq.rights import Access, Caller, Guard, Need
from escrowmq.rights.matrix import ACTIONS, VIEW, VIEW_IS_ENOUGH, needs_of_read, needs_of_session
from escrowmq.settings import BrokerSettings
from escrowmq.wire import BatchStream, Exchange, Json, Parcel
from escrowmq.wire.actions import messages, rights, table
from escrowmq.wire.parcels import Done

_PRODUCING = (Exchange.SEND, Exchange.PREPARE)


class GuardedCalls:
    """Implements :class:`escrowmq.broker.calls.Dispatcher` over another one, for one caller."""

    def __init__(self, calls: Dispatcher, guard: Guard, caller: Caller) -> None:
        self._calls = calls
        self._guard = guard
        self._caller = caller
        self.settings: BrokerSettings = calls.settings
        self.beside = calls.beside
        self.refused = calls.refused
        self.leave = calls.leave
        self.give_back_unseen = calls.give_back_unseen
        self.run_rounds_here = calls.run_rounds_here
        self.run = calls.run

    @property
    def identity(self) -> tuple[int, int]:
        """See :class:`escrowmq.broker.calls.Dispatcher`."""
        return self._calls.identity

    @property
    def engine(self) -> Any:
        """See :class:`escrowmq.broker.calls.Dispatcher`."""
        return self._calls.engine

    # What the matrix asks

    def group_of_session(self, session: int) -> str | None:
        """Return the producer group of a session; None if there is no such session, or the caller may not produce for
        its group: numbers can be guessed. Raises NOT_LEADER on a standby."""
        group = self._group_of(session)
        return group if group is not None and self._may(Need(Access.PRODUCE, group)) else None

    def groups_of_transactions(self, ids: Sequence[str]) -> set[str | None]:
        """Return the producer groups of the sessions in these ids; None stands for unknown sessions, and for groups
        that the caller has no right for. Does not check that the transactions exist."""
        # with a wrong session in its id, the broker finds no transaction
        found = {self._group_of(transaction_id(text).epoch) for text in ids}
        return {group if group is not None and self._may_know(group) else None for group in found}

    def _group_of(self, session: int) -> str | None:
        engine = self._calls.engine
        if engine is None:
            raise error(Code.NOT_LEADER)
        name: str | None = engine.shard.ledger.sessions.group_name(session)
        return name

    def _may_know(self, group: str) -> bool:
        return any(map(self._may, (VIEW, Need(Access.PRODUCE, group), Need(Access.ACT, group))))

    def _may(self, need: Need) -> bool:
        return self._caller.principal.rule_for(need) is not None

    # Calls with rows

    def exchange(
        self,
        kind: Exchange,
        batch: pa.RecordBatch | None,
        options: Mapping[str, Any],
        source: Hashable = None,
        allowance: Allowance | None = None,
    ) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.broker.calls.Calls.exchange`."""
        try:
            topics: list[str] = []
            if batch is not None:
                check_schema(kind, batch.schema)
                if kind in _PRODUCING:
                    topics = _distinct(batch.column("topic"))
                self._guard.spend(self._caller, batch.num_rows, batch.get_total_buffer_size())
            self._check(kind, topics, options)
        except Exception as problem:
            return answer(Future(), broker_failed("checking rights", problem))
        return self._calls.exchange(kind, batch, options, source, allowance)

    def parcel(self, parcel: Parcel, done: Done, sound_bytes: int | None = None, source: Hashable = None) -> None:
        """See :meth:`escrowmq.broker.calls.Calls.parcel`."""
        try:
            producing = parcel.kind in _PRODUCING
            if self._caller.principal.limits.is_set:
                size = sound_bytes or (sum(map(row_size, parcel.rows)) if producing else 0)
                self._guard.spend(self._caller, len(parcel.rows), size)
            topics = dict.fromkeys(row[0] for row in parcel.rows) if producing else ()
            self._check(parcel.kind, topics, parcel.options)
        except Exception as problem:
            done(broker_failed("checking rights", problem))
            return
        self._calls.parcel(parcel, done, sound_bytes, source)

    def _check(self, kind: Exchange, topics: Any, options: Mapping[str, Any]) -> None:
        if kind in (Exchange.SETTLE, Exchange.RECEIVE):
            group = options.get("group")
            if type(group) is not str:
                raise error(Code.BAD_REQUEST, "'group' is missing")
            self._guard.check(self._caller, (Need(Access.CONSUME, group),))
            return
        session = options.get("session", 0)
        if type(session) is not int:
            raise error(Code.BAD_REQUEST, "'session' is no number")
        self._guard.check(self._caller, (Need(Access.SEND, topic) for topic in topics))
        self._guard.check(self._caller, needs_of_session(session, self))
        most = self._caller.principal.limits.open_transactions
        if kind is Exchange.PREPARE and most is not None:
            self._limit_open(session, most)

    def _limit_open(self, session: int, most: int) -> None:
        engine = self._calls.engine
        if engine is None:
            raise error(Code.NOT_LEADER)
        opened = engine.shard.ledger.open_transactions(session)
        if opened >= most:
            text = f"the producer group has {opened:,} undecided transactions; the limit of its principal is {most:,}"
            raise Overloaded(Code.TOO_MANY_OPEN, text)

    # Other calls

    def action(self, name: str, request: Mapping[str, object]) -> Json:
        """See :meth:`escrowmq.broker.calls.Calls.action`. An operator action is recorded under the principal's name."""
        action = table.ACTIONS.get(name)
        if action is None:
            return self._calls.action(name, request)  # which rejects it
        sound = checked(action.request, request)
        if name in _OWN:
            self._guard.check(self._caller, ACTIONS[name](sound, self))
            return _OWN[name](self, sound)
        sees_all = name in VIEW_IS_ENOUGH and self._may(VIEW)
        if not sees_all:
            self._guard.check(self._caller, ACTIONS[name](sound, self) if name in ACTIONS else [VIEW])
        if "by" in action.request.__annotations__:
            sound = self._sign(sound)
        result = self._calls.action(name, sound)
        if name == messages.LOOKUP.name and not sees_all:
            result["messages"] = [one for one in result["messages"] if self._may_see(one["topic"])]
        return result

    def _sign(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a copy of an operator's request with ``by`` set to the principal's name, whatever name the client
        gave."""
        return {**request, "by": self._caller.principal.name}

    def _may_see(self, topic: str) -> bool:
        return self._may(Need(Access.READ, topic)) or self._may(Need(Access.SEND, topic))

    def read(self, request: Mapping[str, object]) -> BatchStream:
        """See :meth:`escrowmq.broker.calls.Calls.read`."""
        self._guard.check(self._caller, (needs_of_read(request),))
        return self._calls.read(request)

    def watch(self, session: object) -> Listener:
        """See :meth:`escrowmq.broker.calls.Calls.watch`."""
        if type(session) is int:
            self._guard.check(self._caller, needs_of_session(session, self))
        return self._calls.watch(session)

    # Actions about rights

    def _whoami(self, _: Mapping[str, Any]) -> Json:
        caller = self._caller
        said = rights.WhoAmI(
            principal=caller.principal.name,
            authenticated_by=caller.authenticated_by,
            rules=[str(rule) for rule in caller.principal.rules],
            rights=self._guard.rights.digest,
        )
        if caller.token is not None and caller.token.expires_us is not None:
            said["expires_us"] = caller.token.expires_us
        return dict(said)

    def _denials(self, _: Mapping[str, Any]) -> Json:
        return dict(self._guard.denials())

    def _reload(self, _: Mapping[str, Any]) -> Json:
        changed = self._guard.reload(self._caller.principal.name)
        return dict(rights.Reloaded(rights=self._guard.rights.digest, changed=changed))


_OWN: dict[str, Callable[[GuardedCalls, Mapping[str, Any]], Json]] = {
    rights.WHOAMI.name: GuardedCalls._whoami,
    rights.DENIALS.name: GuardedCalls._denials,
    rights.RELOAD.name: GuardedCalls._reload,
}


def _distinct(topics: pa.Array) -> list[str]:
    """Return the distinct topics of a batch, without null. Its content is not validated yet: raises Rejected(BAD_BATCH)
    if it is damaged."""
    try:
        topics.validate(full=True)
        found: list[str | None] = pc.unique(topics).to_pylist()
    except (pa.ArrowException, ValueError) as problem:
        raise error(Code.BAD_BATCH, f"the batch is damaged: {problem}") from None
    return [topic for topic in found if topic is not None]
