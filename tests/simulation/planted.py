"""Bugs planted one at a time, and the seed at which the simulation finds each: ``python planted.py [BUG...] [--seeds N]
[--search]``.

Those of the ledger are of tests/ledger/test_planted.py; here are those of writer, disk, client, wire and the outbox's
target. Run as a program of its own, because a simulation takes the place of time and threads for the whole process.
Prints one line of JSON for each bug: which checker noticed it, at which seed, after how many turns and how much virtual
time. ``KNOWN`` says where to look first; ``--search`` looks at all seeds from 0 on.
"""

from __future__ import annotations

import contextlib
import json
import sys
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [
    str(TESTS / "ledger"),
    *(str(TESTS / "ledger" / room) for room in ("groups", "messages", "transactions", "queues")),
]

import test_planted as of_the_ledger  # noqa: E402

from escrowmq.broker.serving.streams import Read, Watch  # noqa: E402
from escrowmq.broker.writer.shard import Shard  # noqa: E402
from escrowmq.client.admin import Admin  # noqa: E402
from escrowmq.client.consuming.fetching import Fetcher  # noqa: E402
from escrowmq.client.lanes.coalescer import Lane  # noqa: E402
from escrowmq.client.lanes.request import Request, copies  # noqa: E402
from escrowmq.client.producing.ending import EndingCodec  # noqa: E402
from escrowmq.client.producing.judging import Judge  # noqa: E402
from escrowmq.errors import Code, EscrowError  # noqa: E402
from escrowmq.ledger.groups.groups import Groups  # noqa: E402
from escrowmq.ledger.transactions.sessions import Sessions  # noqa: E402
from escrowmq.log import active  # noqa: E402
from escrowmq.model import COMMIT  # noqa: E402
from escrowmq.outbox.targets import escrow  # noqa: E402
from escrowmq.schemas import Kind  # noqa: E402
from escrowmq.testing.disks import FaultDisk, MemoryFile  # noqa: E402
from escrowmq.wire import frames  # noqa: E402
from escrowmq.wire.channel import TlsChannel  # noqa: E402
from escrowmq.wire.frames import answers, columns  # noqa: E402
from escrowmq_lab.simulation.brokers import NodeDisk  # noqa: E402
from escrowmq_lab.simulation.plan import CARRYING, Scale  # noqa: E402
from escrowmq_lab.simulation.swarm import simulate  # noqa: E402

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[str, Plant]] = {name: ("ledger", plant) for name, (plant, _) in of_the_ledger.PLANTED.items()}


def bug(room: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS[plant.__name__] = room, plant
        return plant

    return register


# Writer and log


@bug("writer")
def answer_before_the_sync(monkeypatch):
    real = Shard.finishing

    def finishing(self, pairs):
        for request, answer in pairs:
            request.answer(self._check(answer))
        return real(self, [])

    monkeypatch.setattr(Shard, "finishing", finishing)


@bug("log")
def never_sync(monkeypatch):
    monkeypatch.setattr(MemoryFile, "sync", lambda self: None)


@bug("log")
def take_a_failed_sync_for_done(monkeypatch):
    real = MemoryFile.sync

    def sync(self):
        with contextlib.suppress(OSError):
            real(self)

    monkeypatch.setattr(MemoryFile, "sync", sync)


@bug("log")
def skip_the_sync_of_the_folder(monkeypatch):
    monkeypatch.setattr(FaultDisk, "sync_folder", lambda self: None)
    monkeypatch.setattr(NodeDisk, "sync_folder", lambda self: None)


@bug("log")
def skip_the_sync_of_a_new_segments_header(monkeypatch):
    def begin(self):
        self._file.write_at(0, [self.header.pack()])
        self._disk.rename(self.name + active.TEMPORARY, self.name)
        self._disk.sync_folder()
        self._file.renamed(self.name)
        return active.ActiveSegment(self._file, active.HEADER_BYTES, self._allocated, self._data)

    monkeypatch.setattr(active.PreparedSegment, "begin", begin)


# Client


@bug("client")
def give_what_is_sent_again_new_ids(monkeypatch):
    real = Request.pack

    def pack(self, codec, kind, options):
        if self.sent > 1:
            self.parcel = None
        return real(self, codec, kind, options)

    monkeypatch.setattr(Request, "pack", pack)


@bug("client")
def call_what_was_lost_done(monkeypatch):
    real = Lane._on_failure

    def failed(self, request, problem):
        if problem.code is Code.DISCONNECTED and str(self._kind) in ("settle", "end"):
            self._finish(request, [Code.COMMITTED] * len(copies(problem, request)))
        else:
            real(self, request, problem)

    monkeypatch.setattr(Lane, "_on_failure", failed)


@bug("client")
def take_a_conflict_for_a_commit(monkeypatch):
    real = EndingCodec.receive

    def receive(self, *arguments):
        return [Code.COMMITTED if isinstance(code, EscrowError) else code for code in real(self, *arguments)]

    monkeypatch.setattr(EndingCodec, "receive", receive)


@bug("client")
def commit_what_the_checker_does_not_know(monkeypatch):
    real = Judge.one
    monkeypatch.setattr(Judge, "one", lambda self, given: real(self, given) or COMMIT)


@bug("client")
def forget_to_ask_again_after_giving_back(monkeypatch):
    monkeypatch.setattr(Fetcher, "has_something", lambda self: bool(self._ready) or self._fenced is not None)


@bug("client")
def do_not_ask_again_after_a_lost_receive(monkeypatch):
    monkeypatch.setattr(Fetcher, "_on_pause_end", lambda self, number, pause: None)


@bug("client")
def let_newer_requests_overtake(monkeypatch):
    real = Lane._on_failure

    def failed(self, request, problem):
        real(self, request, problem)
        if self.broken:
            self.broken = False
            self._worth = 1

    monkeypatch.setattr(Lane, "_on_failure", failed)


# Wire


@bug("wire")
def answer_rows_in_another_order(monkeypatch):
    real = frames.rows_answer
    monkeypatch.setattr(frames, "rows_answer", lambda number, rows: real(number, rows[::-1]))


@bug("wire")
def lose_the_rest_of_a_frame(monkeypatch):
    real = frames.Assembler.filled

    def filled(self, count):
        found = real(self, count)
        if found:
            self._rest = None
        return found

    monkeypatch.setattr(frames.Assembler, "filled", filled)


@bug("wire")
def mix_answers_up(monkeypatch):
    real = frames.codes_answer
    last = [b""]

    def answered(number, codes):
        before, last[0] = last[0], codes
        return real(number, before if len(before) == len(codes) else codes)

    monkeypatch.setattr(frames, "codes_answer", answered)


@bug("wire")
def read_the_last_row_twice(monkeypatch):
    real = frames.read_parcel

    def read(frame):
        parcel = real(frame)
        if len(parcel.rows) > 1:
            parcel.rows = [*parcel.rows[:-1], parcel.rows[0]]
        return parcel

    monkeypatch.setattr(frames, "read_parcel", read)


@bug("wire")
def swap_two_rows(monkeypatch):
    """The ids of a parcel follow from the order of its rows."""
    real = frames.read_parcel

    def read(frame):
        parcel = real(frame)
        if len(parcel.rows) > 1:
            parcel.rows = [parcel.rows[1], parcel.rows[0], *parcel.rows[2:]]
        return parcel

    monkeypatch.setattr(frames, "read_parcel", read)


@bug("wire")
def shift_the_nulls_of_a_column(monkeypatch):
    """Whether a row of a batch has a key is what the row before it has."""
    real = frames.read_columns

    def read(frame):
        kind, batch, options = real(frame)
        at = batch.schema.get_field_index("key")
        if at >= 0 and batch.num_rows > 1:
            keys = batch.column(at).to_pylist()
            keys = [keys[0], *(None if before is None else key for before, key in pairwise(keys))]
            batch = batch.set_column(at, batch.schema.field(at), pa.array(keys, pa.utf8()))
        return kind, batch, options

    monkeypatch.setattr(frames, "read_columns", read)


@bug("wire")
def end_a_value_a_byte_too_late(monkeypatch):
    """The bodies of a batch lie one after the other; an end that is off by one takes a byte of the next."""
    real = frames.read_columns

    def read(frame):
        kind, batch, options = real(frame)
        at = batch.schema.get_field_index("body")
        if at >= 0 and batch.num_rows > 1:
            bodies = batch.column(at).to_pylist()
            bodies = [bodies[0] + bodies[1][:1], bodies[1][1:], *bodies[2:]]
            batch = batch.set_column(at, batch.schema.field(at), pa.array(bodies, pa.binary()))
        return kind, batch, options

    monkeypatch.setattr(frames, "read_columns", read)


# Carrier


@bug("carrier")
def lose_the_credit_of_a_read(monkeypatch):
    """Credit does not wake a read that waits for it."""

    def add_credit(self, size):
        with self._lock:
            self._credit += size

    monkeypatch.setattr(Read, "add_credit", add_credit)


@bug("carrier")
def send_a_part_out_of_order(monkeypatch):
    real = columns.split_parts

    def split(pieces):
        parts = real(pieces)
        return parts if len(parts) < 4 else [parts[0], parts[2], parts[1], *parts[3:]]

    monkeypatch.setattr(answers, "split_parts", split)


@bug("carrier")
def give_an_answer_to_another_request(monkeypatch):
    """The number is that of the answer before."""
    real, last = frames.rows_answer, [0]

    def answered(number, rows):
        before, last[0] = last[0], number
        return real(before or number, rows)

    monkeypatch.setattr(frames, "rows_answer", answered)


@bug("carrier")
def send_a_frame_after_a_cancel(monkeypatch):
    """A cancelled read is answered at once, and its worker answers it again."""
    real = Read.cancel

    def cancel(self):
        self._connection.send([[frames.done(self._number)]])
        real(self)

    monkeypatch.setattr(Read, "cancel", cancel)


@bug("carrier")
def lose_the_rest_of_a_split_tls_record(monkeypatch):
    real = TlsChannel._receive_raw

    def receive(self, certain):
        data, at = real(self, certain), 0
        while at + 5 <= len(data) and (end := at + 5 + int.from_bytes(data[at + 3 : at + 5], "big")) <= len(data):
            at = end
        return data[:at] or data

    monkeypatch.setattr(TlsChannel, "_receive_raw", receive)


@bug("carrier")
def push_after_the_close_of_a_watch(monkeypatch):
    """It is answered, and stays in the list of those that are asked."""
    monkeypatch.setattr(Watch, "cancel", lambda self: self._connection.send([[frames.done(self._number)]]) and None)


# Sessions, operators, and the outbox's target


@bug("ledger")
def let_a_late_request_for_a_session_fence(monkeypatch):
    monkeypatch.setattr(Sessions, "_find_opened", lambda self, *_: None)


@bug("ledger")
def alter_nothing(monkeypatch):
    """What a group is altered to is answered, and not applied."""
    monkeypatch.setitem(Groups._row_acts, Kind.ALTERED, lambda self, *_: None)


@bug("client")
def discard_every_dead_letter(monkeypatch):
    real = Admin.discard_dead_letters
    monkeypatch.setattr(Admin, "discard_dead_letters", lambda self, group, items=None: real(self, group))


@bug("outbox")
def take_a_lost_batch_for_sent(monkeypatch):
    real = escrow._Broker._on_failure

    def failed(self, problem):
        real(self, problem)
        return Code.OK

    monkeypatch.setattr(escrow._Broker, "_on_failure", failed)


@bug("outbox")
def send_rows_under_new_ids(monkeypatch):
    real = escrow._Broker._send

    def send(self, batch):
        at = batch.schema.get_field_index("message_id")
        ids = pa.array([uuid.uuid4().bytes for _ in range(batch.num_rows)], batch.schema.field(at).type)
        return real(self, batch.set_column(at, batch.schema.field(at), ids))

    monkeypatch.setattr(escrow._Broker, "_send", send)


KNOWN: dict[str, int] = {
    "apply_a_commit_twice": 0,
    "accept_the_opposite_decision": 41,
    "make_half_messages_visible": 0,
    "publish_what_is_rolled_back": 0,
    "publish_only_the_first_message_of_a_transaction": 0,
    "count_checks_in_memory_only": 0,
    "ask_the_decided": 0,
    "ask_once_too_often": 1,
    "forget_the_last_id_of_a_run": 3,
    "let_something_stand_between_two_messages_of_a_transaction": 9,
    "alter_nothing": 23,
    "answer_before_the_sync": 6,
    "skip_the_sync_of_the_folder": 0,
    "call_what_was_lost_done": 3,
    "take_a_conflict_for_a_commit": 25,
    "commit_what_the_checker_does_not_know": 1,
    "do_not_ask_again_after_a_lost_receive": 0,
    "mix_answers_up": 0,
    "answer_rows_in_another_order": 0,
    "read_the_last_row_twice": 0,
    "swap_two_rows": 0,
    "shift_the_nulls_of_a_column": 0,
    "end_a_value_a_byte_too_late": 0,
    "lose_the_credit_of_a_read": 0,
    "send_a_part_out_of_order": 0,
    "give_an_answer_to_another_request": 0,
    "send_a_frame_after_a_cancel": 17,
    "lose_the_rest_of_a_split_tls_record": 1,
    "push_after_the_close_of_a_watch": 0,
    "take_a_lost_batch_for_sent": 46,
    "send_rows_under_new_ids": 6,
}


def find(name: str, seeds: list[int]) -> dict[str, object]:
    """Plant a bug, and run seeds until one notices."""
    room, plant = BUGS[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        for tried, seed in enumerate(seeds, 1):
            result = simulate(seed, CARRYING if room == "carrier" else Scale())
            if not result.ok:
                first = result.violations[0]
                return {
                    "bug": name,
                    "room": room,
                    "caught_by": first.what,
                    "seed": seed,
                    "turns": result.steps,
                    "virtual_seconds": round(result.seconds, 2),
                    "seeds_tried": tried,
                    "detail": str(first).splitlines()[0][:200],
                }
    return {"bug": name, "room": room, "caught_by": None, "seeds_tried": len(seeds)}


def main(arguments: list[str]) -> None:
    search = "--search" in arguments
    seeds = int(arguments[arguments.index("--seeds") + 1]) if "--seeds" in arguments else 60
    names = [name for name in arguments if name in BUGS] or list(BUGS if search else KNOWN)
    for name in names:
        order = list(range(seeds))
        if not search and name in KNOWN:
            order = [KNOWN[name], *order]
        print(json.dumps(find(name, order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
