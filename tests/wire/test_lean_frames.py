"""The lean carrier's frames: their bytes for ever, there and back, taken apart at any place, and whatever is not one."""

import functools
import random
import re
import struct
from pathlib import Path

import lean_examples as examples
import pyarrow as pa
import pytest
from escrowmq.wire.lean import arrow
from escrowmq.wire.lean.frames import frame
from escrowmq.wire.lean.rows import EXCHANGE_OF, encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.errors import Code, EscrowError, Overloaded, Rejected
from escrowmq.model import Outcome
from escrowmq.schemas import ENDED, ENDING, OUTGOING
from escrowmq.wire import Exchange, Parcel, lean
from escrowmq.wire.parcels import PARCEL_ROWS, batch_of

PAGE = Path(__file__).parents[2] / "docs" / "lean.md"
LIMIT = lean.MAX_REQUEST_BYTES


def whole(raw, most=LIMIT):
    """The one frame of these bytes."""
    (found,) = lean.Reader(most).feed(bytes(raw))
    return found


def test_the_bytes_on_the_page_are_the_bytes():
    page = dict(re.findall(r"^([A-Z]+)\n((?:    [0-9a-f ]+\n)+)", PAGE.read_text(), re.MULTILINE))
    assert {name: bytes.fromhex(text) for name, text in page.items()} == examples.EXAMPLES


def test_the_page_names_every_kind():
    text = PAGE.read_text()
    assert [kind.name for kind in lean.Kind if f"| `{kind:#04x}` | {kind.name} |" not in text] == []


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_examples_are_of_their_kind_and_read_again(name):
    came = whole(examples.EXAMPLES[name])
    assert came.kind == lean.Kind[name]
    read = {
        "HELLO": lambda: lean.read_hello(came.content).format == 1,
        "RECEIVE": lambda: lean.read_receive(came.content) == examples.RECEIVE,
        "WELCOME": lambda: lean.read_answer(came) == examples.WELCOME,
        "ROWS": lambda: lean.read_answer(came) == [(0, 7, 1, -1, examples.TRANSACTION), (37, -1, -1, -1, None)],
        "CODES": lambda: lean.read_answer(came) == bytes([1, 18]),
        "PONG": lambda: lean.read_answer(came) == b"now",
        "PING": lambda: came.content == b"now",
        "ERROR": lambda: str(lean.read_answer(came)) == str(examples.REFUSAL),
        "WITHDRAWN": lambda: lean.read_answer(came) is None,
        "GONE": lambda: lean.read_answer(came) is None,
        "CANCEL": lambda: came.number == 5 and not came.content,
        "GOODBYE": lambda: not came.content,
    }
    parcel = came.kind in EXCHANGE_OF and name != "RECEIVE"
    assert lean.read_parcel(came.kind, came.content).rows if parcel else read[name]()


INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text("aZ0é€\U0001d11e\0", max_size=20)
ID = st.binary(min_size=16, max_size=16)
OUTGOING_ROW = st.tuples(
    TEXT,
    st.binary(max_size=100),
    st.none() | TEXT,
    st.none() | TEXT,
    st.none() | st.lists(st.tuples(TEXT, TEXT), max_size=3),
    st.none() | ID,
    st.integers(-(1 << 31), (1 << 31) - 1),
    INT64,
    INT64,
    INT64,
    st.none() | ID,
)
ROWS = {
    Exchange.SEND: OUTGOING_ROW,
    Exchange.PREPARE: OUTGOING_ROW,
    Exchange.END: st.tuples(ID, st.sampled_from(Outcome)),
    Exchange.SETTLE: st.tuples(INT64, INT64, INT64, st.integers(0, 255), INT64, st.none() | TEXT),
}
OPTIONS = st.dictionaries(TEXT, st.none() | st.booleans() | INT64 | TEXT, max_size=4)


@st.composite
def parcels(draw):
    kind = draw(st.sampled_from(list(ROWS)))
    first = (0, 0)
    if kind in (Exchange.SEND, Exchange.PREPARE):
        first = (draw(st.integers(0, (1 << 64) - 1)), draw(st.integers(0, (1 << 63) - 1)))
    return Parcel(kind, draw(st.lists(ROWS[kind], min_size=1, max_size=4)), draw(OPTIONS), first)


@given(st.integers(0, (1 << 64) - 1), parcels())
@settings(max_examples=40)
def test_a_parcel_comes_out_as_it_went_in(number, parcel):
    came = whole(lean.parcel_request(number, parcel))
    read = lean.read_parcel(came.kind, came.content)
    assert came.number == number
    assert (read.kind, read.rows, dict(read.options), read.first_id) == (
        parcel.kind,
        parcel.rows,
        parcel.options,
        parcel.first_id,
    )


@given(st.lists(parcels(), min_size=1, max_size=4), st.data())
@settings(max_examples=25)
def test_frames_come_apart_wherever_the_stream_is_cut(sent, data):
    frames = [bytes(lean.parcel_request(number, parcel)) for number, parcel in enumerate(sent)]
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = lean.Reader(LIMIT)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert [frame(lean.Kind(one.kind), one.number, bytes(one.content)) for one in found] == frames
    assert (reader.waiting, reader.frames) == (0, len(frames))


def test_byte_by_byte():
    stream = b"".join(bytes(raw) for raw in examples.EXAMPLES.values())
    reader = lean.Reader(LIMIT)
    found = [one for at in range(len(stream)) for one in reader.feed(stream[at : at + 1])]
    assert [lean.Kind(one.kind).name for one in found] == list(examples.EXAMPLES)


def test_a_length_that_is_only_said_takes_no_memory():
    reader = lean.Reader(LIMIT)
    assert reader.feed(struct.pack("<IBQ", LIMIT - 4, lean.Kind.SEND, 1)) == []
    assert reader.waiting == 13


@pytest.mark.parametrize("length", [0, 8, LIMIT - 3, (1 << 32) - 1])
def test_a_length_that_cannot_be_is_refused_before_its_bytes_come(length):
    with pytest.raises(Rejected) as caught:
        lean.Reader(LIMIT).feed(struct.pack("<I", length))
    assert caught.value.code in (Code.BAD_REQUEST, Code.BATCH_TOO_LARGE)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n"]
)
def test_who_speaks_something_else_is_noticed_at_once(said):
    with pytest.raises(Rejected):
        lean.Reader(lean.MAX_REQUEST_BYTES).feed(said)


READERS = {
    lean.Kind.HELLO: lean.read_hello,
    lean.Kind.RECEIVE: lean.read_receive,
    lean.Kind.BATCH: lean.read_batch,
}


def refusal(kind, content):
    read = READERS.get(kind) or functools.partial(lean.read_parcel, kind)
    with pytest.raises(EscrowError) as caught:
        read(memoryview(content))
    return caught.value.code


NONE = encoder.encode({})


def row(**changed):
    names = ("topic", "body", "key", "tag", "properties", "message_id", "queue", "born", "delay", "immunity", "joins")
    values = dict(zip(names, examples.FULL, strict=True)) | changed
    return tuple(values.values())


def send(*rows, first=(0, 0), options=NONE):
    return encoder.encode((options, rows, first))


BAD_PARCELS = {
    "nothing": b"",
    "cut": send(row())[:-1],
    "followed by more": send(row()) + b"\0",
    "no rows": send(),
    "too many rows": send(*[row()] * (PARCEL_ROWS + 1)),
    "a column too few": send(row()[:-1]),
    "a column too many": send((*row(), None)),
    "no topic": send(row(topic=None)),
    "a topic that is not text": send(row(topic=b"t")),
    "a body that is text": send(row(body="text")),
    "a short id": send(row(message_id=b"short")),
    "a long id": send(row(message_id=bytes(17))),
    "a queue of more than 32 bits": send(row(queue=1 << 31)),
    "a time of more than 64 bits": send(row(born=1 << 63)),
    "no whole number": send(row(delay=1.5)),
    "not a number": send(row(delay=float("nan"))),
    "properties with null": send(row(properties=[("a", None)])),
    "properties of three": send(row(properties=[("a", "b", "c")])),
    "properties within properties": send(row(properties=[("a", ["b"])])),
    "text that is not UTF-8": send(row(key="AAAA")).replace(b"AAAA", b"A\xff\xfeA"),
    "half a surrogate": send(row(key="AAA")).replace(b"AAA", b"\xed\xa0\x80"),
    "a sequence that cannot be counted on": send(row(), first=(0, 1 << 63)),
    "a negative instance": send(row(), first=(-1, 0)),
    "a map": encoder.encode({"rows": []}),
    "deep": b"\x91" * 100_000 + b"\0",
    "rows without end": b"\x93\xc4\x00\xdd\xff\xff\xff\xff",
    "a body without end": b"\x93\xc4\x01\x80\x91\x9b\xa1t\xc6\xff\xff\xff\xff",
    "long options": send(row(), options=bytes(5000)),
}


@pytest.mark.parametrize("name", BAD_PARCELS)
def test_rows_that_are_not_sound_are_refused(name):
    assert refusal(lean.Kind.SEND, BAD_PARCELS[name]) is Code.BAD_BATCH


@pytest.mark.parametrize(
    "options",
    [b"", b"\xc0", encoder.encode([1]), encoder.encode({"a": [1]}), encoder.encode({"a": 1.5}), encoder.encode({"a": b"b"}),
     encoder.encode({1: 2}), encoder.encode({str(number): 1 for number in range(40)}), NONE + NONE],
)  # fmt: skip
def test_options_that_are_none_are_refused(options):
    assert refusal(lean.Kind.SEND, send(row(), options=options)) is Code.BAD_REQUEST
    assert refusal(lean.Kind.RECEIVE, encoder.encode((options,))) is Code.BAD_REQUEST


@pytest.mark.parametrize(
    "said",
    [b"", b"\xc0", encoder.encode((b"EscrowMQ", 1, 1)), encoder.encode((b"EscrowMQ", 2, 1, None)), encoder.encode((b"EscrowMQ", 1, 9, None)),
     encoder.encode((b"SomeMQ..", 1, 1, None)), encoder.encode((b"EscrowMQ", 1, 1, "secret")), encoder.encode((b"EscrowMQ", 1, 1, None, 5))],
)  # fmt: skip
def test_greetings_that_are_not_understood_are_refused(said):
    assert refusal(lean.Kind.HELLO, said) is Code.BAD_REQUEST


@given(st.sampled_from([lean.Kind.SEND, lean.Kind.END, lean.Kind.SETTLE]), st.data())
@settings(max_examples=150)
def test_a_damaged_parcel_is_refused_or_sound(kind, data):
    """A few bytes changed anywhere: what is read is sound, or a refusal is raised; nothing else."""
    raw = bytearray(examples.EXAMPLES[kind.name][lean.HEADER_BYTES :])
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[at] = data.draw(st.integers(0, 255))
    try:
        parcel = lean.read_parcel(kind, memoryview(bytes(raw)))
    except EscrowError as problem:
        assert problem.code in (Code.BAD_BATCH, Code.BAD_REQUEST)  # noqa: PT017
    else:
        batch_of(parcel).validate(full=True)


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_garbage_is_refused_by_every_reader(raw):
    for kind in (lean.Kind.HELLO, lean.Kind.SEND, lean.Kind.END, lean.Kind.SETTLE, lean.Kind.RECEIVE, lean.Kind.BATCH):
        assert refusal(kind, raw) in (Code.BAD_BATCH, Code.BAD_REQUEST)
    for kind in (lean.Kind.WELCOME, lean.Kind.ROWS, lean.Kind.ANSWERED, lean.Kind.ERROR, lean.Kind.SEND, 0x77):
        with pytest.raises(EscrowError):
            lean.read_answer(lean.Frame(kind, 1, memoryview(raw)), Exchange.RECEIVE)


def test_batches_travel_both_ways():
    asked, answered = examples.ending_batch(), examples.ended_batch()
    kind, batch, options = lean.read_batch(whole(lean.batch_request(1, Exchange.END, asked, {"session": 5})).content)
    assert (kind, options) == (Exchange.END, {"session": 5})
    assert batch.equals(asked)
    assert lean.read_answer(whole(lean.batch_answered(1, answered)), Exchange.END).equals(answered)


def test_a_receive_is_no_batch():
    raw = encoder.encode((int(lean.Kind.RECEIVE), NONE, b""))
    assert refusal(lean.Kind.BATCH, raw) is Code.BAD_BATCH


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_batch_is_refused_before_it_is_inflated(codec):
    batch = batch_of(Parcel(Exchange.SEND, [row(body=bytes(1 << 20))], {}))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, OUTGOING, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    raw = bytes(memoryview(messages.read_next_message().serialize()))
    assert len(raw) < 1 << 16
    with pytest.raises(Rejected, match="compressed"):
        arrow.read_record_batch(raw, OUTGOING)


def test_damaged_batches_are_refused_or_whole():
    batch = batch_of(Parcel(Exchange.SEND, [row(), row()], {}))
    raw, chance, refused = bytes(memoryview(batch.serialize())), random.Random(15), 0
    for _ in range(1500):
        changed = bytearray(raw)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(600)] = chance.randrange(256)
        try:
            arrow.read_record_batch(bytes(changed[: chance.choice([len(raw), chance.randrange(len(raw))])]), OUTGOING)
        except Rejected:
            refused += 1
    assert 500 < refused < 1500


def test_a_batch_of_another_schema_is_refused():
    with pytest.raises(Rejected):
        arrow.read_record_batch(bytes(memoryview(examples.ended_batch().serialize())), ENDING)
    with pytest.raises(Rejected):
        arrow.read_record_batch(bytes(memoryview(ENDED.serialize())), ENDED)


def test_errors_keep_when_to_come_back_and_long_quotes_are_cut():
    told = lean.read_answer(whole(lean.refused(1, Overloaded(Code.QUEUE_FULL, retry_after=2.5))))
    assert isinstance(told, Overloaded)
    assert told.retry_after == 2.5
    told = lean.read_answer(whole(lean.refused(1, Rejected(Code.BAD_BATCH, "x" * 5000 + "\udc80"))))
    assert len(told.message) == 1000
    newer = encoder.encode((250, "of tomorrow", "", None))
    told = lean.read_answer(lean.Frame(lean.Kind.ERROR, 1, memoryview(newer)))
    assert told.code is Code.BAD_REQUEST
    assert "of tomorrow" in told.message
