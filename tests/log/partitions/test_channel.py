"""The channel against a partition in memory that misbehaves: what is told to count does count, whatever comes late, in
another order, without an offset or never.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_scripts import SALT, SHARD, frame, send_frames

from escrowmq.errors import Code, Corrupt, EscrowError, Fenced, Misuse, Unknown
from escrowmq.log.kafka import records
from escrowmq.log.kafka.channel import Channel, Round, claim
from escrowmq.log.kafka.fold import Fold, Standing, Taken
from escrowmq.log.kafka.partition import Partition, Partitions
from escrowmq.log.kafka.records import RecordType
from escrowmq.log.kafka.rule import Verdict, prove
from escrowmq.testing.partitions import MemoryKafka, MemoryPartition

SEED = (SHARD, SALT)
FRAME = len(frame(0, 0, epoch=0))


def open_channel(kafka: MemoryKafka, url: str = "escrow://a", **options: Any) -> tuple[Channel, MemoryPartition]:
    partition = kafka.opener()
    return claim(partition, Fold(), url=url, seed=SEED, timeout=60, **options), partition


def frames(start: int, count: int = 1, **options: Any) -> bytes:
    return b"".join(frame(start + i, start + i, epoch=0, **options) for i in range(count))


def folded(kafka: MemoryKafka) -> tuple[Standing, list[Taken]]:
    fold = Fold()
    taken = [fold.take(offset, kafka.log[offset]) for offset in range(kafka.log.next)]
    return fold.standing, taken


@contextmanager
def refused(error: type[EscrowError], code: Code) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    assert caught.value.code is code


def test_the_memory_is_a_partition() -> None:
    kafka = MemoryKafka()
    partitions: Partitions = kafka.partitions()
    partition: Partition = partitions.log()
    assert partition.ends(0) == (0, 0)
    assert partition.read(0) == []
    with refused(Corrupt, Code.DAMAGED):
        partition.read(1)


def test_what_is_waited_for_counts() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    first, second = send_frames(channel, frames(0, 2)), send_frames(channel, frames(2))
    assert channel.send_act(b"an act\n").wait().act_bytes == 7
    behind = second.wait()
    assert (behind.sequence, behind.offset, behind.number) == (3, 3, 3)
    assert first.wait().sequence == 2
    assert channel.release().released is False
    standing, taken = folded(kafka)
    assert {t.verdict for t in taken[1:]} == {Verdict.COUNTS}
    assert standing.released
    assert (standing.sequence, standing.offset) == (channel.standing.sequence, channel.standing.offset) == (3, 5)
    with refused(Unknown, Code.CLOSED):
        channel.beat()


def test_a_standing_told_is_what_a_reader_comes_to() -> None:
    """So it can be noted, and gone on from."""
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    told = [send_frames(channel, frames(0, 2)).wait(), channel.beat().wait()]
    told += [channel.send_act(b"x" * 2_000_000).wait(), send_frames(channel, frames(2, body=2_000_000)).wait()]
    fold, whole = Fold(), []
    for offset in range(kafka.log.next):
        fold.take(offset, kafka.log[offset])
        whole.append(fold.whole)
    assert [standing in whole for standing in told] == [True] * 4
    assert told[-1] == fold.standing == channel.standing


def test_frames_are_joined_and_cut() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    many = records.LARGEST_PAYLOAD // FRAME + 3
    data = frames(0, many)
    data += frames(many, body=2_000_000) + frames(many + 1, 2)
    send_frames(channel, data).wait()
    _, taken = folded(kafka)
    assert b"".join(t.content for t in taken if t.type == RecordType.FRAMES) == data
    assert [t.type.name for t in taken] == ["CLAIM", "FRAMES", "FRAMES", "PART", "PART", "FRAMES", "FRAMES"]
    assert max(map(len, kafka.log.records)) == records.LARGEST_RECORD


def test_frames_out_of_place_are_not_sent() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    for wrong in (frames(1), frame(0, 1), frames(0) + frames(0), b""):
        with refused(Misuse, Code.BAD_ARGUMENT):
            send_frames(channel, wrong)
    assert kafka.log.next == 1
    assert send_frames(channel, frames(0)).wait().sequence == 1


def test_acknowledgements_in_any_order() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    partition.change(held=True, order=lambda reports: reversed(list(reports)))
    rounds = [send_frames(channel, frames(n)) for n in range(5)]
    partition.change(held=False)
    assert [r.wait().sequence for r in rounds] == [1, 2, 3, 4, 5]
    assert channel.gaps == 0


def test_a_round_counts_only_when_all_before_it_do() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    held: list[tuple[int, int]] = []

    def but_the_first(reports: list[tuple[int, int]]) -> list[tuple[int, int]]:
        held.extend(r for r in reports if r[0] == 1)
        return [r for r in reports if r[0] != 1]

    partition.change(order=but_the_first)
    first, second = send_frames(channel, frames(0)), send_frames(channel, frames(1))
    with refused(Unknown, Code.TIMED_OUT):
        second.wait(0.05)
    partition.change(order=lambda reports: [*reports, *held])
    third = send_frames(channel, frames(2))
    assert [r.wait().sequence for r in (third, second, first)] == [3, 2, 1]


def test_void_records_in_a_gap_are_passed_over() -> None:
    kafka = MemoryKafka()
    old, _ = open_channel(kafka)
    new, _ = open_channel(kafka, "escrow://b")
    old.beat()  # lands behind the claim
    kafka.write(kafka.log[1])  # a claim that was kept twice
    assert send_frames(new, frames(0)).wait() == folded(kafka)[0]
    assert new.gaps == 1
    assert send_frames(old, frames(0)).number == 2


def test_a_claim_in_a_gap_fences() -> None:
    kafka = MemoryKafka()
    old, partition = open_channel(kafka)
    partition.change(slow=True)
    before, behind = send_frames(old, frames(0)), send_frames(old, frames(1))
    partition.land(1)
    new, _ = open_channel(kafka, "escrow://b")
    assert new.standing.sequence == 1
    partition.land()
    assert before.wait().sequence == 1, "it lies before the claim: it counts, and may be told"
    with refused(Fenced, Code.FENCED):
        behind.wait()
    assert old.failure is not None
    assert "escrow://b" in old.failure.message
    for call in (old.beat, old.release, lambda: send_frames(old, frames(1)), lambda: old.confirm(1)):
        with refused(Fenced, Code.FENCED):
            call()
    assert before.wait().sequence == 1
    assert send_frames(new, frames(1)).wait().sequence == 2


def test_a_claim_for_another_log_fences_nobody() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    kafka.write(records.pack_claim(records.Claim(salt=1, url="x"), shard=5, nonce=6, sequence=0))
    assert send_frames(channel, frames(0)).wait().sequence == 1
    assert channel.gaps == 1


def test_a_record_stored_nobody_knows_where() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    open_channel(MemoryKafka())
    partition.change(unknown={1, 2, 4})
    rounds = [send_frames(channel, frames(n)) for n in range(4)]
    assert [r.wait().offset for r in rounds] == [2, 3, 4, 5]
    kafka.write(kafka.log[0])
    partition.change(unknown={5})
    assert send_frames(channel, frames(4)).wait().offset == 7


def test_a_record_stored_nobody_knows_where_behind_a_claim() -> None:
    kafka = MemoryKafka()
    old, partition = open_channel(kafka)
    partition.change(slow=True, unknown={1})
    sent = send_frames(old, frames(0))
    open_channel(kafka, "escrow://b")
    partition.land()
    with refused(Fenced, Code.FENCED):
        sent.wait()


def test_a_producer_that_ended() -> None:
    """What was acknowledged before counts; of the rest nobody knows."""
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    first = send_frames(channel, frames(0))
    partition.change(slow=True)
    second = send_frames(channel, frames(1))
    partition.change(failure=RuntimeError("fatal"))
    assert first.wait().sequence == 1
    with refused(Corrupt, Code.LOG_FAILED):
        second.wait()
    with refused(Corrupt, Code.LOG_FAILED):
        send_frames(channel, frames(2))
    again, _ = open_channel(kafka)
    assert again.standing.sequence == 1


def test_a_refusal_to_send_ends_the_channel() -> None:
    channel, partition = open_channel(MemoryKafka())
    partition.change(failure=RuntimeError("fatal"))
    with refused(Corrupt, Code.LOG_FAILED):
        send_frames(channel, frames(0))
    with refused(Corrupt, Code.LOG_FAILED):
        channel.beat()


def test_patience_ends() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka, patience=0.05)
    partition.change(cut_off=True)
    sent = send_frames(channel, frames(0))
    with refused(Corrupt, Code.LOG_FAILED):
        sent.wait()
    partition.change(cut_off=False)
    with refused(Corrupt, Code.LOG_FAILED):  # although it was stored in the end: the next opening finds it
        sent.wait()
    assert open_channel(kafka)[0].standing.sequence == 1


def test_a_gap_that_cannot_be_read_ends_the_channel() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka, patience=0.05)
    kafka.write(kafka.log[0])
    partition.change(silent=True)
    with refused(Corrupt, Code.LOG_FAILED):
        send_frames(channel, frames(0)).wait()


def test_a_strangers_record_in_a_gap_is_passed_over() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    kafka.write(b"a stranger's", b"")
    send_frames(channel, frames(0)).wait()
    assert channel.gaps == 1
    standing, taken = folded(kafka)
    assert [t.foreign for t in taken] == [False, True, True, False]
    assert (standing.sequence, standing.offset) == (channel.standing.sequence, channel.standing.offset) == (1, 4)


def test_what_cannot_be_read_in_a_gap_ends_the_channel() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    kafka.write(kafka.log[0][:-1])
    with refused(Corrupt, Code.DAMAGED):
        send_frames(channel, frames(0)).wait()


def test_a_gap_that_was_deleted_fences() -> None:
    """Only an owner deletes, so there is another."""
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    kafka.write(kafka.log[0], kafka.log[0])
    partition.delete_before(3)
    with refused(Fenced, Code.FENCED):
        send_frames(channel, frames(0)).wait()


def test_who_waits_when_it_is_closed() -> None:
    channel, partition = open_channel(MemoryKafka())
    partition.change(held=True)
    sent = send_frames(channel, frames(0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sent.wait)
        channel.close()
        with refused(Unknown, Code.CLOSED):
            waiting.result()
    channel.close()


def test_it_beats_while_nothing_is_sent_and_notices_by_itself_that_it_is_fenced() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka, beat_seconds=0.02, replicas=lambda: ("escrow://a", "escrow://b"))
    channel.start()
    with kafka.changed:
        assert kafka.changed.wait_for(lambda: kafka.log.next >= 4, 60)
    fold = Fold()
    assert {fold.take(n, kafka.log[n]).type.name for n in range(4)} == {"CLAIM", "BEAT"}
    assert fold.replicas == ("escrow://a", "escrow://b")
    open_channel(kafka, "escrow://b")
    channel._beat_thread.join(60)
    assert channel.failure is not None
    assert channel.failure.code is Code.FENCED
    channel.close()


@pytest.mark.parametrize("body", [10, 500_000, 2_000_000])
def test_frames_in_chunks_become_the_same_records(body: int) -> None:
    made = [frames(n, body=body) for n in range(3)]
    kafkas = MemoryKafka(), MemoryKafka()
    whole, chunked = (open_channel(kafka)[0] for kafka in kafkas)
    send_frames(whole, b"".join(made)).wait()
    chunked.send_frames([[memoryview(one)[:56], memoryview(one)[56:]] for one in made]).wait()
    contents = [
        [records.payload_of(raw, records.read_header(raw, 0), 0).tobytes() for raw in k.log.records[1:]] for k in kafkas
    ]
    assert contents[0] == contents[1]
    assert b"".join(contents[1]) == b"".join(made)


def test_who_leads_reads_gaps_alone() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    assert partition.rests == 0
    channel.start()
    assert partition.rests == 1  # what was followed is not followed any more
    kafka.write(kafka.log[0])  # a repetition, which is void
    send_frames(channel, frames(0)).wait()
    assert (channel.gaps, partition.rests) == (1, 2)
    send_frames(channel, frames(1)).wait()
    assert (channel.gaps, partition.rests) == (1, 2)
    channel.close()


def test_confirm_waits_for_what_was_sent_after_it_began() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka)
    send_frames(channel, frames(0)).wait()
    before = channel.proved_at
    channel.confirm(60)
    assert channel.proved_at > before
    partition.change(held=True)
    with refused(Unknown, Code.TIMED_OUT):
        channel.confirm(0.02)
    open_channel(kafka, "escrow://b")
    partition.change(held=False)
    with refused(Fenced, Code.FENCED):
        channel.confirm(60)


def test_many_threads_share_one_channel() -> None:
    kafka = MemoryKafka()
    channel, partition = open_channel(kafka, beat_seconds=0.01)
    partition.change(order=lambda reports: sorted(reports, key=lambda r: -r[0]))
    channel.start()
    turn = threading.Lock()
    at = iter(range(1000))

    def work(_: int) -> list[tuple[Round, int]]:
        sent = []
        for _ in range(10):
            with turn:  # one writer, as the engine's
                n = next(at)
                sent.append((send_frames(channel, frames(n)), n))
            sent[-1][0].wait()
            channel.confirm(60)
        return sent

    with ThreadPoolExecutor(8) as pool:
        done = [pair for pairs in pool.map(work, range(8)) for pair in pairs]
    assert {r.wait().sequence - 1 - n for r, n in done} == {0}
    channel.close()
    assert folded(kafka)[0].sequence == 80


# Claiming


def test_a_claim_takes_what_was_sent_before_it() -> None:
    kafka = MemoryKafka()
    first, _ = open_channel(kafka)
    send_frames(first, frames(0, 3)).wait()
    taken: list[Taken] = []
    fold = Fold()
    second = claim(kafka.opener(), fold, url="escrow://b", on_record=taken.append)
    assert [t.verdict.value for t in taken] == ["claims", "counts", "claims"]
    assert second.standing == fold.standing
    assert (fold.standing.epoch, fold.standing.sequence, fold.standing.url) == (2, 3, "escrow://b")
    with refused(Fenced, Code.FENCED):
        first.beat().wait()


def test_of_two_that_make_the_log_the_first_decides() -> None:
    kafka = MemoryKafka()
    slow, fold = kafka.opener(), Fold()  # it asks while the partition is empty, and is slow then
    slow.change(slow=True)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(claim, slow, fold, url="escrow://b", seed=(5, 6))
        with kafka.changed:
            assert kafka.changed.wait_for(lambda: slow.on_the_way == 1, 60)
        open_channel(kafka)
        slow.change(slow=False)
        channel = second.result()
    assert (channel.standing.shard, channel.standing.salt, channel.standing.epoch) == (SHARD, SALT, 2)
    assert send_frames(channel, frames(0)).wait().sequence == 1
    assert [t.verdict.value for t in folded(kafka)[1]] == ["claims", "void", "claims", "counts"]


def test_a_claim_stored_nobody_knows_where() -> None:
    kafka = MemoryKafka()
    send_frames(open_channel(kafka)[0], frames(0)).wait()
    partition = kafka.opener()
    partition.change(unknown={0})
    channel = claim(partition, Fold(), url="escrow://b")
    assert (channel.standing.sequence, channel.standing.epoch) == (1, 2)


def test_a_partition_that_lost_what_was_read() -> None:
    kafka = MemoryKafka()
    channel, _ = open_channel(kafka)
    send_frames(channel, frames(0)).wait()
    send_frames(channel, frames(1)).wait()
    fold = Fold()
    for offset in range(3):
        fold.take(offset, kafka.log[offset])
    kafka.lose(2)
    with refused(Corrupt, Code.DAMAGED):
        claim(kafka.opener(), fold, url="escrow://b")


@pytest.mark.parametrize("fault", ["cut_off", "held", "silent"])
def test_a_claim_without_an_answer(fault: str) -> None:
    kafka = MemoryKafka()
    partition = kafka.opener()
    partition.change(**{fault: True})
    with refused(Unknown, Code.TIMED_OUT):
        claim(partition, Fold(), url="escrow://a", timeout=0.05)


# The rule


@given(st.permutations(range(6)), st.integers(0, 5), st.integers(0, 3))
def test_offsets_in_any_order_prove_the_same(order: list[int], gap: int, width: int) -> None:
    """Acknowledgements one by one, in any order, end where all of them at once do: at the gap, or behind the last."""
    offsets = {n: 10 + n + (width if n >= gap else 0) for n in range(6)}
    at = prove(0, 10, {})
    seen: dict[int, int] = {}
    for number in order:
        seen[number] = offsets[number]
        at = prove(at.number, at.offset, seen)
    assert at == prove(0, 10, offsets)
    assert at == ((6, 16, None) if not width else (gap, 10 + gap, 10 + gap + width))
