"""Bugs of the client: what is sent again, receipts, ends, sessions, several brokers, answers of checkers."""

from __future__ import annotations

from typing import Any

from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Request, copies
from escrowmq.client.producing.ending import EndingCodec
from escrowmq.client.producing.judging import Judge
from escrowmq.client.producing.outgoing import OutgoingCodec
from escrowmq.client.producing.production import Production
from escrowmq.client.producing.transaction import Transaction, TransactionBase
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN
from planting import Plant, bug


@bug(
    "client",
    "client/lanes/test_client_parcels.py::test_under_a_new_session_the_rows_and_their_ids_are_the_same",
    "(refused.rows, refused.first_id) == (taken.rows, taken.first_id)",
)
def give_what_is_sent_again_new_ids(plant: Plant) -> None:
    real = Request.pack

    @plant.instead(Request, "pack")
    def pack(self: Any, codec: Any, kind: Any, options: Any) -> Any:
        if self.sent > 1:
            self.parcel = None
        return real(self, codec, kind, options)


@bug(
    "client",
    "client/lanes/test_client_lanes.py::test_whoever_arrives_while_a_batch_is_in_flight_rides_in_the_next",
    "stored[receipt.message_id] for receipt in results",
)
def give_callers_the_receipts_of_each_other(plant: Plant) -> None:
    real = OutgoingCodec.receive

    @plant.instead(OutgoingCodec, "receive")
    def receive(self: Any, *given: Any) -> Any:
        return real(self, *given)[::-1]


@bug(
    "client",
    "client/lanes/test_client_lanes.py::test_what_was_lost_goes_before_what_is_newer",
    "[b'0', b'2', b'1']",
)
def let_newer_requests_overtake(plant: Plant) -> None:
    real = Lane._on_failure

    @plant.instead(Lane, "_on_failure")
    def failed(self: Any, request: Any, problem: Any) -> None:
        real(self, request, problem)
        if self.broken:
            self.broken = False
            self._worth = 1
            self._go_on()


@bug(
    "client",
    "client/producing/test_client_oneway.py::test_an_end_that_the_connection_lost_is_sent_again",
    "assert outcome(twin, txn) is mq.COMMIT",
)
def call_an_end_that_was_lost_done(plant: Plant) -> None:
    real = Lane._on_failure

    @plant.instead(Lane, "_on_failure")
    def failed(self: Any, request: Any, problem: EscrowError) -> None:
        if problem.code is Code.DISCONNECTED and str(self._kind) == "end":
            self._finish(request, [Code.COMMITTED] * len(copies(problem, request)))
        else:
            real(self, request, problem)


@bug(
    "client",
    "behaviour/test_half_messages.py::test_the_first_decision_is_final[embedded-2]",
    "DID NOT RAISE",
)
def take_a_conflict_for_a_commit(plant: Plant) -> None:
    real = EndingCodec.receive

    @plant.instead(EndingCodec, "receive")
    def receive(self: Any, *given: Any) -> Any:
        return [Code.COMMITTED if isinstance(code, EscrowError) else code for code in real(self, *given)]


@bug(
    "client",
    "client/producing/test_client_producing.py::test_an_end_that_was_applied_and_lost_counts_as_success",
    "ALREADY_COMMITTED",
)
def tell_the_echo_of_its_own_end_as_another_s(plant: Plant) -> None:
    real = EndingCodec.receive

    @plant.instead(EndingCodec, "receive")
    def receive(self: Any, rows: Any, first_id: Any, memo: Any, answer: Any, resent: bool) -> Any:
        return real(self, rows, first_id, memo, answer, False)


@bug(
    "client",
    "client/producing/test_client_producing.py::test_an_exception_rolls_back_and_goes_on",
    'assert twin.topics["t"] == []',
)
def commit_though_the_block_raised(plant: Plant) -> None:
    real = Transaction.__exit__

    @plant.instead(Transaction, "__exit__")
    def leave(self: Any, kind: Any, raised: Any, trace: Any) -> Any:
        return real(self, None, None, None)


@bug(
    "client",
    "client/producing/test_client_batch_checkers.py::test_a_bound_transaction_that_raised_ends_as_the_database_says",
    "outcome(twin, txn) is mq.COMMIT",
)
def roll_back_without_asking_the_database(plant: Plant) -> None:
    real = TransactionBase._end

    @plant.instead(TransactionBase, "_end")
    async def end(self: Any, outcome: Any) -> Any:
        if outcome is ROLLBACK:
            self._asks.clear()
        return await real(self, outcome)


@bug(
    "client",
    "client/producing/test_client_batch_checkers.py::test_what_is_not_known_is_left_to_the_check_back[commit-told0]",
    "DID NOT RAISE",
)
def commit_what_the_database_has_not_decided(plant: Plant) -> None:
    real = TransactionBase._ask

    @plant.instead(TransactionBase, "_ask")
    async def asked(self: Any, ask: Any, identity: Any) -> Any:
        answer = await real(self, ask, identity)
        return COMMIT if answer is UNKNOWN else answer


@bug(
    "client",
    "client/producing/test_client_producing.py::test_the_checker_answers_questions[0]",
    'assert ending.to_pylist() == [{"transaction": bytes(txn.id), "outcome": int(expected)}]',
)
def roll_back_what_the_checker_does_not_know(plant: Plant) -> None:
    real = Judge.one

    @plant.instead(Judge, "one")
    def one(self: Any, answer: Any) -> Any:
        return real(self, answer) or ROLLBACK


@bug(
    "client",
    "client/producing/test_client_judging.py::test_in_a_batch_it_spoils_no_other",
    "assert answers(twin) == list(zip(ids, [1, 0, 2], strict=True))",
)
def shift_the_answers_behind_one_that_is_none(plant: Plant) -> None:
    @plant.instead(Judge, "each")
    def each(self: Any, answers: Any) -> Any:
        known = [one for one in (self.one(answer) for answer in answers) if one is not UNKNOWN]
        return [*known, UNKNOWN]


@bug(
    "client",
    "client/producing/test_client_forgotten.py::test_what_was_refused_is_sent_again_unchanged",
    "UNKNOWN_SESSION",
)
def keep_a_session_that_the_broker_has_forgotten(plant: Plant) -> None:
    @plant.instead(Lane, "_forget")
    def forget(self: Any, request: Any) -> None:
        self._finish(request, copies(EscrowError(Code.UNKNOWN_SESSION), request))


@bug(
    "client",
    "client/producing/test_client_producing.py::test_several_brokers_by_key_by_turns_and_pinned",
    "assert all(len(t.rows) == 10 for twin in twins for t in twin.transactions.values())",
)
def send_the_messages_of_a_transaction_by_turns(plant: Plant) -> None:
    real = Production.produce

    @plant.instead(Production, "produce")
    async def produce(self: Any, kind: Any, topic: Any, body: Any, transaction_id: Any = None, **options: Any) -> Any:
        return await real(self, kind, topic, body, None, **options)


@bug(
    "client",
    "client/producing/test_client_producing.py::test_what_was_lost_is_never_sent_to_another_broker",
    'assert sorted(len(twin.topics["t"]) for twin in twins) == [1, 2]',
)
def send_what_was_lost_to_another_broker(plant: Plant) -> None:
    real = Lane._on_failure

    @plant.instead(Lane, "_on_failure")
    def failed(self: Any, request: Any, problem: EscrowError) -> None:
        moved = error(Code.BROKER_AWAY) if problem.code is Code.DISCONNECTED else problem
        real(self, request, moved)
