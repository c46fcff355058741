"""Bugs of the wire: frames, rows, batches, answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from escrowmq.wire.lean import answers, arrow, frames, requests
from escrowmq.wire.lean.frames import Reader

from escrowmq.client.links import places
from escrowmq.client.links.connection import LeanConnection
from escrowmq.errors import Code, error
from escrowmq.wire import parcels
from planting import Plant, bug

FRAMES = "wire/test_lean_frames.py::"


@bug(
    "wire",
    FRAMES + "test_a_parcel_comes_out_as_it_went_in",
    "assert (read.kind, read.rows, dict(read.options), read.first_id) == ( parcel.kind, parcel.",
)
def swap_key_and_tag(plant: Plant) -> None:
    real = requests.read_parcel

    @plant.instead(requests, "read_parcel")
    def read_parcel(kind: int, content: Any) -> Any:
        parcel = real(kind, content)
        if len(parcel.rows[0]) > 6:
            parcel.rows = [(*row[:2], row[3], row[2], *row[4:]) for row in parcel.rows]
        return parcel


@bug("wire", FRAMES + "test_a_length_that_cannot_be_is_refused_before_its_bytes_come[4194301]", "DID NOT RAISE")
def allow_a_byte_more_than_the_limit(plant: Plant) -> None:
    real = Reader._checked

    @plant.instead(Reader, "_checked")
    def checked(self: Any, length: int) -> int:
        real(self, length - 1)
        return length


@bug("wire", FRAMES + "test_a_length_that_cannot_be_is_refused_before_its_bytes_come[8]", "DID NOT RAISE")
def believe_a_length_without_a_header(plant: Plant) -> None:
    @plant.instead(Reader, "_checked")
    def checked(self: Any, length: int) -> int:
        if length > self.most:
            raise error(Code.BATCH_TOO_LARGE)
        return length


@bug("wire", FRAMES + "test_a_length_that_is_only_said_takes_no_memory", "reader.waiting == 13")
def take_memory_for_a_length_that_is_only_said(plant: Plant) -> None:
    real = Reader.feed

    @plant.instead(Reader, "feed")
    def feed(self: Any, data: bytes) -> Any:
        found = real(self, data)
        self._rest += bytes(max(self._wanted - len(self._rest), 0))
        return found


@bug("wire", FRAMES + "test_byte_by_byte", "BATCH_TOO_LARGE")
def lose_the_rest_of_a_frame(plant: Plant) -> None:
    real = Reader.feed

    @plant.instead(Reader, "feed")
    def feed(self: Any, data: bytes) -> Any:
        found = real(self, data)
        if not found and len(self._rest) > frames.HEADER_BYTES:
            self._rest.clear()
        return found


@bug("wire", FRAMES + "test_a_compressed_batch_is_refused_before_it_is_inflated[zstd]", "DID NOT RAISE")
def inflate_what_a_stranger_compressed(plant: Plant) -> None:
    real = arrow._compressed

    @plant.instead(arrow, "_compressed")
    def compressed(raw: bytes) -> bool:
        real(raw)
        return False


@bug("wire", FRAMES + "test_rows_that_are_not_sound_are_refused[too many rows]", "DID NOT RAISE")
def read_rows_without_a_bound(plant: Plant) -> None:
    from escrowmq.wire.lean.rows import OptionsBytes, Outgoing, decoder

    read = decoder(tuple[OptionsBytes, list[Outgoing], tuple[int, int]])

    @plant.instead(requests, "read_parcel")
    def read_parcel(kind: int, content: Any) -> Any:
        options, rows, first = read(content)
        return parcels.Parcel(requests.EXCHANGE_OF[kind], rows, options, first)


@bug("wire", FRAMES + "test_options_that_are_none_are_refused[\\x80\\x80]", "DID NOT RAISE")
def read_options_that_are_none(plant: Plant) -> None:
    @plant.instead(requests, "_options")
    def options(raw: bytes) -> Any:
        return {}


@bug("wire", FRAMES + "test_errors_keep_when_to_come_back_and_long_quotes_are_cut", "retry_after == 2.5")
def forget_when_to_come_back(plant: Plant) -> None:
    real = answers._problem

    @plant.instead(answers, "_problem")
    def problem(number: int, message: str, hint: str, retry_after: Any) -> Any:
        return real(number, message, hint, None)


@bug(
    "wire",
    "client/lanes/test_client_parcels.py::test_receipts_from_a_parcel_are_those_from_a_batch",
    "assert answer_of(Exchange.PREPARE, answer) == answers",
)
def read_a_transaction_where_there_is_none(plant: Plant) -> None:
    """The null bitmap of a column is not looked at: what lies under it are sixteen zeros."""
    real = parcels.answer_of

    @plant.instead(parcels, "answer_of")
    def answer_of(kind: Any, answer: Any) -> Any:
        found = real(kind, answer)
        return [(*row[:4], row[4] or bytes(16)) for row in found] if isinstance(found, list) else found


@bug(
    "wire",
    "client/links/test_lean_link.py::test_an_answer_goes_to_the_request_that_it_names_and_not_to_the_oldest",
    "(older.done(), newer.done()) == (False, True)",
)
def give_an_answer_to_the_request_that_waits_longest(plant: Plant) -> None:
    real = LeanConnection._take

    @plant.instead(LeanConnection, "_take")
    def take(self: Any, data: bytes) -> None:
        oldest = sorted(self._pending)
        frames = self._frames.feed
        self._frames.feed = lambda came: [
            one._replace(number=first) if one.number else one for one, first in zip(frames(came), oldest, strict=False)
        ]
        try:
            real(self, data)
        finally:
            del self._frames.feed


@bug(
    "wire",
    "client/links/test_lean_link.py::test_who_is_no_welcome_broker_is_not_spoken_to[epoch]",
    "assert len(flight.flown) == before + 1",
)
def speak_to_whoever_has_the_port_now(plant: Plant) -> None:
    real = places._greeted

    @plant.instead(places, "_greeted")
    def greeted(broker: Any, place: Any, deadline: float) -> Any:
        met = SimpleNamespace(shard=AnyNumber(), epoch=AnyNumber())
        return real(broker, met, deadline)


class AnyNumber:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
