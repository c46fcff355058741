"""The fold: what counts, what is void, what is refused; and that every reader comes to the same, from wherever it goes
on.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_scripts import SALT, SHARD, Sender, frame, opening

from escrowmq.errors import Code, Corrupt, Misuse
from escrowmq.log.kafka import records
from escrowmq.log.kafka.fold import Fold, Standing, Taken
from escrowmq.log.kafka.records import RecordType
from escrowmq.log.kafka.rule import Verdict


def folded(*partition: bytes, fold: Fold | None = None) -> list[Taken]:
    fold = fold or Fold()
    start = fold.standing.offset
    return [fold.take(start + i, raw) for i, raw in enumerate(partition)]


def verdicts(*partition: bytes) -> list[str]:
    return [taken.verdict.value for taken in folded(*partition)]


def refused(fold: Fold, offset: int, raw: bytes, code: Code = Code.DAMAGED) -> str:
    """The sentence of the refusal; the fold stays as it was."""
    before = (fold.standing, fold.whole, fold.replicas)
    with pytest.raises(Corrupt) as caught:
        fold.take(offset, raw)
    assert caught.value.code is code
    assert (fold.standing, fold.whole, fold.replicas) == before
    return caught.value.message


def test_one_owner() -> None:
    a = Sender(1)
    fold = Fold()
    claim, *others = folded(a.claim(), a.frames(2), a.beat(), a.act(), a.frames(1, rows=3), fold=fold)
    assert (claim.verdict, claim.type) == (Verdict.CLAIMS, RecordType.CLAIM)
    assert {taken.verdict for taken in others} == {Verdict.COUNTS}
    assert [[header.sequence for _, header in taken.frames] for taken in others] == [[0, 1], [], [], [2]]
    at, header = others[0].frames[1]
    assert bytes(others[0].content[at : at + header.frame_bytes]) == frame(1, 1, epoch=0)
    assert bytes(others[2].content) == b'{"act":"x"}\n'
    assert fold.replicas == ("a", "b")
    assert fold.standing == Standing(5, 1, 1, 5, 3, 5, 0, 12, SHARD, SALT, "escrow://node1", False)
    folded(a.record(RecordType.RELEASE, b""), fold=fold)
    assert fold.standing.released


def test_what_an_earlier_owner_sent_is_void_behind_the_claim() -> None:
    a, b = Sender(1), Sender(2, epoch=2)
    before = a.frames()
    late = [a.frames(), a.beat(), a.act(), a.frames()]
    b.sequence = b.position = 1
    found = verdicts(a.claim(), before, b.claim(), late[0], b.frames(), *late[1:], b.frames())
    assert found == ["claims", "counts", "claims", "void", "counts", "void", "void", "void", "counts"]


def test_a_repetition_is_void() -> None:
    a = Sender(1)
    claim, once = a.claim(), a.frames()
    assert verdicts(claim, claim, once, once, a.frames()) == ["claims", "void", "counts", "void", "counts"]


def test_nothing_counts_before_a_claim() -> None:
    a = Sender(1)
    fold = Fold()
    assert [taken.verdict for taken in folded(a.frames(), a.beat(), fold=fold)] == [Verdict.VOID] * 2
    assert fold.standing == Standing(offset=2)


def test_of_two_new_logs_the_first_claim_decides_which_it_is() -> None:
    a, b = Sender(1), Sender(2, shard=99)
    fold = Fold()
    found = folded(a.claim(), b.claim(salt=5), Sender(3).claim(salt=5), a.frames(), fold=fold)
    assert [taken.verdict.value for taken in found] == ["claims", "void", "void", "counts"]
    assert (fold.standing.shard, fold.standing.salt, fold.standing.epoch) == (SHARD, SALT, 1)


def test_a_frame_in_parts() -> None:
    a = Sender(1)
    large = frame(1, 1, rows=9, epoch=0)
    fold = Fold()
    found = folded(a.claim(), a.frames(), *a.cut(large, [100, 7, 300]), fold=fold)
    assert [len(taken.frames) for taken in found] == [0, 1, 0, 0, 0, 1]
    assert bytes(found[-1].content) == large
    assert (fold.standing.sequence, fold.standing.position) == (2, 10)
    a.sequence = 2
    act = folded(*a.cut(b"a long act\n", [3], RecordType.ACT), fold=fold)[-1]
    assert bytes(act.content) == b"a long act\n"
    assert fold.standing.act_bytes == 11


def test_parts_are_dropped_by_a_claim_and_a_mark_never_lies_between_them() -> None:
    a, b = Sender(1), Sender(2, epoch=2, sequence=1, position=1)
    fold = Fold()
    folded(a.claim(), a.frames(), fold=fold)
    whole = fold.whole
    parts = a.cut(frame(1, 1, rows=9, epoch=0), [100, 7])
    folded(parts[0], Sender(9).beat(), parts[1], fold=fold)
    assert fold.whole == whole == Standing(**{**fields(fold.standing), "offset": 2, "number": 2})
    found = folded(b.claim(), parts[2], b.frames(), fold=fold)
    assert [taken.verdict.value for taken in found] == ["claims", "void", "counts"]
    assert fold.whole == fold.standing


def fields(standing: Standing) -> dict[str, Any]:
    return {name: getattr(standing, name) for name in standing.__struct_fields__}


def test_what_is_missing_is_damage() -> None:
    a = Sender(1)
    fold = Fold()
    folded(a.claim(), a.frames(), fold=fold)
    lost, following = a.frames(), a.frames()
    assert "offset 2 on are missing" in refused(fold, 3, following)
    assert "was read before" in refused(fold, 1, lost)
    assert "records 2 to 2 of its sender are missing" in refused(fold, 2, following)
    folded(lost, following, fold=fold)


def test_what_does_not_fit_is_damage() -> None:
    a = Sender(1)
    fold = Fold()
    folded(a.claim(), a.frames(), fold=fold)

    def made(data: bytes, sequence: int = 1, epoch: int = 1, type: RecordType = RecordType.FRAMES) -> bytes:
        return records.pack(type, data, shard=SHARD, epoch=epoch, nonce=1, number=2, sequence=sequence)

    good = frame(1, 1)
    assert "out of place" in refused(fold, 2, made(frame(2, 1)))
    assert "out of place" in refused(fold, 2, made(frame(1, 2)))
    assert "of frame 2" in refused(fold, 2, made(good, sequence=2))
    assert "epoch 2" in refused(fold, 2, made(good, epoch=2))
    assert "of opener 1 among those of 0" in refused(fold, 2, made(good))
    assert "checksum of frame 1" in refused(fold, 2, made(frame(1, 1, salt=5)))
    assert "not whole" in refused(fold, 2, made(good[:-8]))
    assert "not where" in refused(fold, 2, made(b"\0" * 64))
    assert "within a frame's header" in refused(fold, 2, made(opening(1, 1, 1) + b"EMQF"))
    assert "no frame" in refused(fold, 2, made(b""))
    assert "does not decode" in refused(fold, 2, made(b"{", type=RecordType.BEAT))
    folded(made(opening(1, 1, 4)), fold=fold)
    assert fold.standing.frame_epoch == 4


def test_a_claim_without_a_number_is_damage() -> None:
    assert "claims without" in refused(Fold(), 0, Sender(1, shard=0).claim())
    assert "does not decode" in refused(
        Fold(), 0, records.pack(RecordType.CLAIM, b"{}", shard=1, epoch=0, nonce=1, number=0, sequence=0)
    )


def test_a_beat_between_parts_is_damage() -> None:
    a = Sender(1)
    fold = Fold()
    folded(a.claim(), a.cut(frame(0, 0), [10])[0], fold=fold)
    a.number = 2
    assert "between the parts" in refused(fold, 2, a.beat())


FOREIGN = (b"", b"{}", bytes(100), b"EMQF" + bytes(90))


def test_what_is_not_ours_is_void_once_its_owner_goes_on() -> None:
    a, fold = Sender(1), Fold()
    folded(*FOREIGN, a.claim(), fold=fold)
    assert fold.whole.offset == len(FOREIGN) + 1, "nobody owned the log, so nothing is in doubt"
    standing = fold.standing
    before = fold.whole
    folded(*FOREIGN, fold=fold)
    assert fold.whole == before, "another fold must meet what is in doubt"
    folded(a.frames(), fold=fold)
    assert fold.whole == fold.standing
    assert fold.standing.sequence == standing.sequence + 1


def test_what_is_not_ours_is_damage_if_its_owner_was_not_heard_of_again() -> None:
    """It may be what that one sent last, and was answered."""
    a, fold = Sender(1), Fold()
    folded(a.claim(), b"{}", fold=fold)
    assert "no other writers" in refused(fold, 2, Sender(2).claim())


def test_what_is_short_or_broken_is_refused() -> None:
    for broken in (b"EMQK", b"EMQK" + bytes(90)):
        refused(Fold(), 0, broken)


def test_every_flipped_bit_is_noticed() -> None:
    a = Sender(1)
    fold = Fold()
    folded(a.claim(), fold=fold)
    raw, following = a.frames(), a.frames(1)
    for bit in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit < 32:  # it could be another program's: the next one tells
            doubting = Fold(fold.standing)
            folded(bytes(flipped), fold=doubting)
            assert "missing" in refused(doubting, 2, following)
        else:
            refused(fold, 1, bytes(flipped))
    folded(raw, fold=fold)


def test_a_newer_version_is_told_from_damage() -> None:
    import xxhash

    raw = bytearray(Sender(1).claim())
    raw[4] = 2
    raw[56:64] = xxhash.xxh3_64_intdigest(bytes(raw[:56])).to_bytes(8, "little")
    assert "format version 2" in refused(Fold(), 0, bytes(raw), Code.NEWER_FORMAT)
    raw[4], raw[44] = 1, 7
    raw[56:64] = xxhash.xxh3_64_intdigest(bytes(raw[:56])).to_bytes(8, "little")
    assert "type 7" in refused(Fold(), 0, bytes(raw), Code.NEWER_FORMAT)


def test_a_record_has_a_largest_size() -> None:
    a = Sender(1)
    assert len(a.record(RecordType.PART, bytes(records.LARGEST_PAYLOAD))) == records.LARGEST_RECORD
    with pytest.raises(Misuse, match="BATCH_TOO_LARGE"):
        a.record(RecordType.PART, bytes(records.LARGEST_PAYLOAD + 1))
    cut = [sum(map(len, pieces)) for pieces in records.cut([memoryview(bytes(2 * records.LARGEST_PAYLOAD + 1))])]
    assert cut == [records.LARGEST_PAYLOAD, records.LARGEST_PAYLOAD, 1]
    assert [sum(map(len, pieces)) for pieces in records.cut([memoryview(b"")])] == [0]


@pytest.mark.parametrize("sizes", [[5], [10], [11], [4, 6, 10, 1], [3, 25, 0, 2], [10, 10], [56, 1]])
def test_chunks_are_cut_as_what_they_are_together(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LARGEST_PAYLOAD", 10)
    whole = bytes(range(sum(sizes)))
    ends = list(itertools.accumulate(sizes))
    chunks = [memoryview(whole)[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    assert [b"".join(pieces) for pieces in records.cut(chunks)] == [
        whole[at : at + 10] for at in range(0, len(whole), 10)
    ]


def test_a_record_is_the_same_of_pieces() -> None:
    known = {"shard": 1, "epoch": 2, "nonce": 3, "number": 4, "sequence": 5}
    assert records.pack(RecordType.ACT, b"one", b"", b"two", **known) == records.pack(
        RecordType.ACT, b"onetwo", **known
    )


# Properties


@st.composite
def partitions(draw: st.DrawFn) -> list[bytes]:
    """What several openers wrote, each of which believed for a while that it owned the log."""
    partition: list[bytes] = []
    senders: list[Sender] = []
    nonces = iter(range(1, 100))
    fold = Fold()
    for _ in range(draw(st.integers(1, 15))):
        what = draw(st.sampled_from(["claim", "frames", "frames", "cut", "beat", "act", "again"]))
        if what == "claim" or not senders:
            standing = fold.standing
            senders.append(Sender(next(nonces), standing.epoch + 1, 1, standing.sequence, standing.position))
            made = [senders[-1].claim()]
        elif what == "again":
            made = [draw(st.sampled_from(partition))]
            if records.read_header(made[0], 0).type == RecordType.CLAIM:
                continue  # Kafka keeps each record once: an old claim does not come again
        else:
            sender = draw(st.sampled_from(senders[-2:]))
            if what == "cut":
                data = frame(sender.sequence, sender.position, epoch=0)
                made = sender.cut(data, [draw(st.integers(1, len(data) - 1))])
                sender.sequence, sender.position = sender.sequence + 1, sender.position + 1
                if draw(st.booleans()):  # the rest never came: its sender is dead
                    made.pop()
                    senders.remove(sender)
            elif what == "frames":
                made = [sender.frames(draw(st.integers(1, 3)))]
            else:
                made = [sender.beat() if what == "beat" else sender.act()]
        folded(*made, fold=fold)
        partition += made
    return partition


def meaning(taken: Taken) -> tuple[Any, ...]:
    return (taken.offset, taken.verdict, taken.header, bytes(taken.content), taken.frames)


@given(partitions())
def test_every_reader_comes_to_the_same(partition: list[bytes]) -> None:
    """Wherever a fold is noted and another goes on, it comes to the same; so a fold of the beginning is the beginning
    of the fold."""
    fold = Fold()
    whole, marks = [], [(0, fold.whole)]
    for taken in folded(*partition, fold=fold):
        whole.append(meaning(taken))
    for size in range(len(partition) + 1):
        first = Fold()
        assert [meaning(taken) for taken in folded(*partition[:size], fold=first)] == whole[:size]
        marks.append((first.whole.offset, first.whole))
    for offset, mark in marks:
        rest = [meaning(taken) for taken in folded(*partition[offset:], fold=Fold(mark))]
        assert rest == whole[offset:]


@given(partitions())
def test_what_counts_is_one_log(partition: list[bytes]) -> None:
    """Frames count in order and without a gap; of one owner nothing counts behind the next claim; void records could as
    well be absent."""
    found = folded(*partition)
    sequences = [header.sequence for taken in found for _, header in taken.frames]
    assert sequences == list(range(len(sequences)))
    owner = 0
    for taken in found:
        if taken.verdict is Verdict.CLAIMS:
            owner = taken.header.nonce
        assert (taken.verdict is Verdict.VOID) or taken.header.nonce == owner
    kept = [raw for raw, taken in zip(partition, found, strict=True) if taken.verdict is not Verdict.VOID]
    assert [meaning(taken)[1:] for taken in folded(*kept)] == [
        meaning(taken)[1:] for taken in found if taken.verdict is not Verdict.VOID
    ]
