"""Bugs of the wire: frames, rows, batches, answers."""

from __future__ import annotations

from typing import Any

from escrowmq.client.links import seeking
from escrowmq.client.links.connection import Connection
from escrowmq.errors import Code, error
from escrowmq.wire import frames, parcels
from escrowmq.wire.frames import Assembler, answers, columns, requests
from planting import Plant, bug

FRAMES = "wire/test_wire_frames.py::"


@bug(
    "wire",
    FRAMES + "test_a_parcel_comes_out_as_it_went_in",
    "assert (read.kind, read.rows, dict(read.options), read.first_id) == ( parcel.kind, parcel.",
)
def swap_key_and_tag(plant: Plant) -> None:
    real = requests.read_parcel

    @plant.instead(frames, "read_parcel")
    def read_parcel(came: Any) -> Any:
        parcel = real(came)
        if len(parcel.rows[0]) > 6:
            parcel.rows = [(*row[:2], row[3], row[2], *row[4:]) for row in parcel.rows]
        return parcel


@bug("wire", FRAMES + "test_an_impossible_length_is_refused_before_its_bytes_come[4194301]", "DID NOT RAISE")
def allow_a_byte_more_than_the_limit(plant: Plant) -> None:
    real = Assembler._check_length

    @plant.instead(Assembler, "_check_length")
    def checked(self: Any, length: int, head: int) -> int:
        return real(self, length - 1, head) + 1


@bug("wire", FRAMES + "test_an_impossible_length_is_refused_before_its_bytes_come[8]", "DID NOT RAISE")
def believe_a_length_without_a_header(plant: Plant) -> None:
    @plant.instead(Assembler, "_check_length")
    def checked(self: Any, length: int, head: int) -> int:
        if length + 4 > self.most:
            raise error(Code.BATCH_TOO_LARGE)
        return length + 4


@bug("wire", FRAMES + "test_an_announced_length_takes_no_memory_before_it_is_allowed", "reader.waiting == 16")
def take_memory_for_a_length_that_is_only_said(plant: Plant) -> None:
    real = Assembler.filled

    @plant.instead(Assembler, "filled")
    def filled(self: Any, count: int) -> Any:
        found = real(self, count)
        if self._rest is not None:
            self._rest += bytes(max(self.claimed - len(self._rest), 0))
        return found


@bug("wire", FRAMES + "test_byte_by_byte", "BATCH_TOO_LARGE")
def lose_the_rest_of_a_frame(plant: Plant) -> None:
    real = Assembler.filled

    @plant.instead(Assembler, "filled")
    def filled(self: Any, count: int) -> Any:
        found = real(self, count)
        if not found and len(self._rest or b"") > frames.HEADER_BYTES:
            self._rest = None
        return found


@bug("wire", FRAMES + "test_parts_that_do_not_make_up_their_size_are_refused[a part too few]", "DID NOT RAISE")
def join_parts_without_counting_them(plant: Plant) -> None:
    real = frames.Gatherer.add

    @plant.instead(frames.Gatherer, "add")
    def add(self: Any, came: Any) -> Any:
        if not came.flags & frames.MORE and came.number in self._in_progress:
            return self._in_progress.pop(came.number)[0]
        return real(self, came)


@bug("wire", FRAMES + "test_a_compressed_batch_is_refused_before_it_is_inflated[zstd]", "DID NOT RAISE")
def inflate_what_a_stranger_compressed(plant: Plant) -> None:
    real = columns._is_compressed

    @plant.instead(columns, "_is_compressed")
    def compressed(raw: Any) -> bool:
        real(raw)
        return False


@bug("wire", FRAMES + "test_rows_that_are_not_sound_are_refused[too many rows]", "DID NOT RAISE")
def read_rows_without_a_bound(plant: Plant) -> None:
    from escrowmq.wire.frames.rows import OptionsBytes, Outgoing, decoder

    read = decoder(tuple[OptionsBytes, list[Outgoing], tuple[int, int]])

    @plant.instead(frames, "read_parcel")
    def read_parcel(came: Any) -> Any:
        options, rows, first = read(came.body)
        return parcels.Parcel(frames.EXCHANGE_OF[came.kind], rows, options, first)


@bug("wire", FRAMES + "test_options_that_are_none_are_refused[\\x80\\x80]", "DID NOT RAISE")
def read_options_that_are_none(plant: Plant) -> None:
    @plant.instead(requests, "_options")
    def options(raw: bytes) -> Any:
        return {}


@bug("wire", FRAMES + "test_errors_keep_when_to_come_back_and_long_quotes_are_cut", "retry_after == 2.5")
def forget_when_to_come_back(plant: Plant) -> None:
    real = answers.error

    @plant.instead(answers, "error")
    def problem(code: Any, message: str, hint: str, retry_after: Any = None) -> Any:
        return real(code, message, hint)


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
    "client/links/test_served_link.py::test_an_answer_goes_to_the_request_that_it_names_and_not_to_the_oldest",
    "(older.done(), newer.done()) == (False, True)",
)
def give_an_answer_to_the_request_that_waits_longest(plant: Plant) -> None:
    real = Connection._process

    @plant.instead(Connection, "_process")
    def take(self: Any, count: int) -> None:
        filled, oldest = self._assembler.filled, sorted(self._pending)

        class Mixed:
            def filled(self, count: int) -> Any:
                came = filled(count)
                return [
                    one._replace(number=first) if one.number else one for one, first in zip(came, oldest, strict=False)
                ]

        kept, self._assembler = self._assembler, Mixed()
        try:
            real(self, count)
        finally:
            self._assembler = kept


@bug(
    "wire",
    "client/links/test_served_link.py::test_one_of_several_that_is_another_shard_by_now_is_not_spoken_to",
    "it did not come to pass",
)
def speak_to_whoever_has_the_port_now(plant: Plant) -> None:
    @plant.instead(seeking.Seeker, "_stranger")
    def stranger(self: Any, met: Any) -> None:
        return None
