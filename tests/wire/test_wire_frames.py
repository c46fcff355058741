"""Frames: their bytes, encoding and decoding, assembly from a stream that is cut anywhere, parts of large answers, and
bad bytes.
"""

import random
import re
import struct
from pathlib import Path

import frame_examples as examples
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.errors import Code, EscrowError, Overloaded, Rejected
from escrowmq.model import Outcome
from escrowmq.schemas import ENDED, ENDING, OUTGOING
from escrowmq.wire import Exchange, Parcel, frames
from escrowmq.wire.frames.frame import SCRATCH_BYTES, frame
from escrowmq.wire.frames.rows import EXCHANGE_OF, encoder
from escrowmq.wire.parcels import PARCEL_ROWS, batch_of

BYTES = Path(__file__).parent / "frames.txt"
LIMIT = 4 << 20


def feed(assembler, data):
    """The frames that become whole when this is received."""
    found, view = [], memoryview(bytes(data))
    while view:
        target = assembler.target()
        count = min(len(target), len(view))
        target[:count] = view[:count]
        view = view[count:]
        found += assembler.filled(count)
    return found


def joined(pieces):
    return b"".join(bytes(memoryview(piece)) for piece in pieces)


def whole(raw, most=LIMIT):
    """The one frame of these bytes."""
    (found,) = feed(frames.Assembler(most), raw)
    return found


def made(kind, content):
    """A frame whose head (of kinds without a body) or body has this content."""
    head = kind in (frames.Kind.HELLO, frames.Kind.RECEIVE, frames.Kind.COLUMNS, frames.Kind.WATCH, frames.Kind.CREDIT)
    nothing, content = memoryview(b""), memoryview(content)
    return frames.Frame(kind, 0, 1, content if head else nothing, nothing if head else content)


def test_the_bytes_of_each_kind_never_change():
    page = dict(re.findall(r"^([A-Z]+)\n((?:    [0-9a-f ]+\n)+)", BYTES.read_text(), re.MULTILINE))
    assert {name: bytes.fromhex(text) for name, text in page.items()} == examples.EXAMPLES


def test_the_description_names_every_kind():
    text = frames.__doc__
    assert [kind.name for kind in frames.Kind if f"| `{kind:#04x}` | {kind.name} |" not in text] == []


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_examples_are_of_their_kind_and_read_again(name):
    came = whole(examples.EXAMPLES[name])
    assert came.kind == frames.Kind[name]
    read = {
        "HELLO": lambda: frames.read_hello(came).format == 2,
        "RECEIVE": lambda: frames.read_receive(came) == examples.RECEIVE,
        "ACTION": lambda: frames.read_action(came) == ("topics.create", {"name": "orders"}),
        "READ": lambda: frames.read_read(came) == ({"source": "orders", "queue": 1}, 8 << 20),
        "CREDIT": lambda: frames.read_credit(came) == 4 << 20,
        "WATCH": lambda: frames.read_watch(came) == 5,
        "WELCOME": lambda: frames.read_welcome(came) == (examples.WELCOME, examples.HELLO),
        "ROWS": lambda: frames.read_rows(came) == [(0, 7, 1, -1, examples.TRANSACTION), (37, -1, -1, -1, None)],
        "CODES": lambda: frames.read_rows(came) == bytes([1, 18]),
        "RESULT": lambda: frames.read_result(came) == {"name": "orders", "queues": 4},
        "PONG": lambda: came.body == b"now",
        "PING": lambda: came.body == b"now",
        "ERROR": lambda: str(frames.read_refusal(came)) == str(examples.REFUSAL),
    }
    parcel = came.kind in EXCHANGE_OF and name != "RECEIVE"
    if parcel:
        assert frames.read_parcel(came).rows
    elif name in read:
        assert read[name]()
    else:
        assert (bytes(came.head), bytes(came.body)) == (b"", b"")


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
    came = whole(frames.parcel_request(number, parcel))
    read = frames.read_parcel(came)
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
    encoded = [bytes(frames.parcel_request(number, parcel)) for number, parcel in enumerate(sent)]
    stream = b"".join(encoded)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = frames.Assembler(LIMIT)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += feed(reader, stream[start:end])
    assert [frame(frames.Kind(one.kind), one.number, bytes(one.body), bytes(one.head)) for one in found] == encoded
    assert (reader.waiting, reader.frames) == (0, len(encoded))


def test_byte_by_byte():
    stream = b"".join(bytes(raw) for raw in examples.EXAMPLES.values())
    reader = frames.Assembler(LIMIT)
    found = [one for at in range(len(stream)) for one in feed(reader, stream[at : at + 1])]
    assert [frames.Kind(one.kind).name for one in found] == list(examples.EXAMPLES)


@pytest.mark.invariant("I46")
def test_an_announced_length_takes_no_memory_before_it_is_allowed():
    asked, allowed = [], []
    reader = frames.Assembler(LIMIT, may_take=lambda size: asked.append(size) or bool(allowed))
    assert feed(reader, struct.pack("<IBBHQ", LIMIT - 4, frames.Kind.COLUMNS, 0, 0, 1)) == []
    assert reader.claimed == LIMIT
    assert reader.waiting == 16
    assert len(reader.target()) == 0
    assert asked == [LIMIT]
    allowed.append(True)
    assert len(reader.target()) == reader.rest == LIMIT - 16


@pytest.mark.parametrize("size", [SCRATCH_BYTES - 16, SCRATCH_BYTES - 15, SCRATCH_BYTES, 3 * SCRATCH_BYTES + 5])
@pytest.mark.parametrize("step", [17, 1000, SCRATCH_BYTES])
def test_frames_around_the_size_of_the_scratch(size, step):
    body = random.Random(size).randbytes(size)
    stream = frame(frames.Kind.ACTION, 1, body, b"head") + frames.ping(b"after")
    reader, found = frames.Assembler(LIMIT), []
    for at in range(0, len(stream), step):
        found += feed(reader, stream[at : at + step])
    assert [(one.kind, bytes(one.head), bytes(one.body)) for one in found] == [
        (frames.Kind.ACTION, b"head", body),
        (frames.Kind.PING, b"", b"after"),
    ]


@pytest.mark.parametrize("length", [0, 8, LIMIT - 3, (1 << 32) - 1])
def test_an_impossible_length_is_refused_before_its_bytes_come(length):
    with pytest.raises(Rejected) as caught:
        feed(frames.Assembler(LIMIT), struct.pack("<I", length))
    assert caught.value.code in (Code.BAD_REQUEST, Code.BATCH_TOO_LARGE)


def test_a_head_that_is_longer_than_its_frame_is_refused():
    with pytest.raises(Rejected, match="header and head"):
        feed(frames.Assembler(LIMIT), struct.pack("<IBBHQ", 12 + 8, frames.Kind.ACTION, 0, 9, 1))


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n"]
)
def test_another_protocol_is_noticed_at_once(said):
    with pytest.raises(Rejected):
        feed(frames.Assembler(LIMIT), said)


def large_batch(rows=3000):
    return batch_of(Parcel(Exchange.SEND, [row(body=bytes([at % 256]) * 1000) for at in range(rows)], {}))


@given(st.data())
@settings(max_examples=15)
def test_parts_are_joined_whatever_stands_between_them(data):
    first, second = large_batch(), large_batch(2500).slice(3)
    one, two = frames.batch_answer(1, first), frames.part_answer(2, second)
    assert len(one) > 2
    order, queues = [], [list(map(joined, one)), list(map(joined, two)), [frames.pong(b"small")] * 3]
    while any(queues):
        order.append(queues[data.draw(st.sampled_from([at for at, queue in enumerate(queues) if queue]))].pop(0))
    gatherer = frames.Gatherer(LIMIT)
    reader, found = frames.Assembler(LIMIT, place=gatherer.place), {}
    stream = b"".join(order)
    step = data.draw(st.sampled_from([5000, SCRATCH_BYTES, 1 << 20, len(stream)]))
    for at in range(0, len(stream), step):
        for came in feed(reader, stream[at : at + step]):
            if came.kind != frames.Kind.PONG and (message := gatherer.add(came)) is not None:
                found[came.number] = frames.decode_batch(message, OUTGOING)
    assert found[1].equals(first)
    assert found[2].equals(second)


def test_a_large_part_behind_the_last_one_of_the_message_before_it_is_of_the_next():
    """As a read sends them: under one number, and with a small last part."""
    sizes = range(1900, 1940)
    batches = [one for one in map(large_batch, sizes) if 0 < frames.size_of(frames.part_answer(1, one)[-1]) < 50_000][
        :4
    ]
    assert len(batches) == 4
    stream = b"".join(joined(part) for batch in batches for part in frames.part_answer(1, batch))
    for step in (1000, SCRATCH_BYTES, 1 << 20):
        gatherer = frames.Gatherer(LIMIT)
        reader, found, left = frames.Assembler(LIMIT, place=gatherer.place), [], memoryview(stream)
        while left:
            target = reader.target()
            count = min(len(target), len(left), step)
            target[:count], left = left[:count], left[count:]
            found += [one for came in reader.filled(count) if (one := gatherer.add(came)) is not None]
        assert [frames.decode_batch(one, OUTGOING).num_rows for one in found] == [batch.num_rows for batch in batches]


@pytest.mark.parametrize(
    "wrong", ["a part too few", "a part too many", "a size over the limit", "a first part without a size"]
)
def test_parts_that_do_not_make_up_their_size_are_refused(wrong):
    parts = [joined(part) for part in frames.batch_answer(1, large_batch())]
    if wrong == "a part too few":
        del parts[1]
    elif wrong == "a part too many":
        parts.insert(1, parts[1])
    elif wrong == "a first part without a size":
        del parts[0]
    gatherer = frames.Gatherer(1 << 20 if wrong == "a size over the limit" else LIMIT)
    reader = frames.Assembler(LIMIT, place=gatherer.place)
    with pytest.raises(Rejected):
        [gatherer.add(came) for came in feed(reader, b"".join(parts))]


def test_a_large_batch_is_sent_from_where_it_lies():
    batch = large_batch()
    pieces = frames.columns_request(1, Exchange.SEND, batch, {"session": 5})
    assert joined(pieces[1:]) == bytes(memoryview(batch.serialize()))
    addresses = {buffer.address for column in batch.columns for buffer in column.buffers() if buffer is not None}
    assert any(isinstance(piece, pa.Buffer) and piece.address in addresses for piece in pieces)


READERS = {
    frames.Kind.HELLO: frames.read_hello,
    frames.Kind.RECEIVE: frames.read_receive,
    frames.Kind.COLUMNS: frames.read_columns,
    frames.Kind.ACTION: frames.read_action,
    frames.Kind.READ: frames.read_read,
    frames.Kind.CREDIT: frames.read_credit,
    frames.Kind.WATCH: frames.read_watch,
}


def refusal(kind, content):
    read = READERS.get(kind, frames.read_parcel)
    with pytest.raises(EscrowError) as caught:
        read(made(kind, content))
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
    assert refusal(frames.Kind.SEND, BAD_PARCELS[name]) is Code.BAD_BATCH


@pytest.mark.parametrize(
    "options",
    [b"", b"\xc0", encoder.encode([1]), encoder.encode({"a": [1]}), encoder.encode({"a": 1.5}),
    encoder.encode({"a": b"b"}),
     encoder.encode({1: 2}), encoder.encode({str(number): 1 for number in range(40)}), NONE + NONE],
)  # fmt: skip
def test_options_that_are_none_are_refused(options):
    assert refusal(frames.Kind.SEND, send(row(), options=options)) is Code.BAD_REQUEST
    assert refusal(frames.Kind.RECEIVE, options) is Code.BAD_REQUEST


@pytest.mark.parametrize(
    "said",
    [b"", b"\xc0", encoder.encode((b"EscrowMQ", 2, 1)), encoder.encode((b"EscrowMQ", 1, 1, None)),
    encoder.encode((b"EscrowMQ", 2, 9, None)),
     encoder.encode((b"SomeMQ..", 2, 1, None)),encoder.encode((b"EscrowMQ", 2, 1, 7)),
     encoder.encode((b"EscrowMQ", 2, 1, None, 5))],
)  # fmt: skip
def test_greetings_that_are_not_understood_are_refused(said):
    assert refusal(frames.Kind.HELLO, said) is Code.BAD_REQUEST


@pytest.mark.invariant("I47")
@given(st.sampled_from([frames.Kind.SEND, frames.Kind.END, frames.Kind.SETTLE]), st.data())
@settings(max_examples=150)
def test_a_damaged_parcel_is_refused_or_sound(kind, data):
    """A few bytes changed anywhere: what is read is sound, or a refusal is raised; nothing else."""
    raw = bytearray(examples.EXAMPLES[kind.name][frames.HEADER_BYTES :])
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
        raw[at] = data.draw(st.integers(0, 255))
    try:
        parcel = frames.read_parcel(made(kind, bytes(raw)))
    except EscrowError as problem:
        assert problem.code in (Code.BAD_BATCH, Code.BAD_REQUEST)  # noqa: PT017
    else:
        batch_of(parcel).validate(full=True)


@pytest.mark.invariant("I47")
@given(st.binary(max_size=200).filter(lambda raw: not raw.strip().startswith(b"{")))  # which may be JSON
@settings(max_examples=100)
def test_garbage_is_refused_by_every_reader(raw):
    for kind in (*READERS, frames.Kind.SEND, frames.Kind.END, frames.Kind.SETTLE):
        if kind is frames.Kind.ACTION:
            continue  # a body is no name, and a frame without a body has a good one
        try:
            READERS.get(kind, frames.read_parcel)(made(kind, raw))
        except EscrowError as problem:
            assert problem.code in (Code.BAD_BATCH, Code.BAD_REQUEST)  # noqa: PT017
        else:
            assert kind in (frames.Kind.CREDIT, frames.Kind.WATCH, frames.Kind.RECEIVE)
    for read in (frames.read_welcome, frames.read_rows, frames.read_refusal, frames.read_schema, frames.read_result):
        with pytest.raises(EscrowError):
            read(frames.Frame(frames.Kind.ROWS, 0, 1, memoryview(raw), memoryview(raw)))


def test_batches_travel_both_ways():
    asked, answered = examples.ending_batch(), examples.ended_batch()
    came = whole(joined(frames.columns_request(1, Exchange.END, asked, {"session": 5})))
    kind, batch, options = frames.read_columns(came)
    assert (kind, options) == (Exchange.END, {"session": 5})
    assert batch.equals(asked)
    (part,) = frames.batch_answer(1, answered)
    assert frames.decode_batch(whole(joined(part)).body, ENDED).equals(answered)
    assert frames.read_schema(whole(frames.schema_answer(1, OUTGOING))).equals(OUTGOING)


def test_a_receive_is_no_batch():
    assert refusal(frames.Kind.COLUMNS, encoder.encode((int(frames.Kind.RECEIVE), NONE))) is Code.BAD_BATCH


@pytest.mark.invariant("I46")
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
        frames.decode_batch(memoryview(raw), OUTGOING)


def test_damaged_batches_are_refused_or_whole():
    batch = batch_of(Parcel(Exchange.SEND, [row(), row()], {}))
    raw, chance, refused = bytes(memoryview(batch.serialize())), random.Random(15), 0
    for _ in range(1500):
        changed = bytearray(raw)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(600)] = chance.randrange(256)
        try:
            frames.decode_batch(
                memoryview(bytes(changed[: chance.choice([len(raw), chance.randrange(len(raw))])])), OUTGOING
            )
        except Rejected:
            refused += 1
    assert 500 < refused < 1500


def test_a_batch_of_another_schema_is_refused():
    with pytest.raises(Rejected):
        frames.decode_batch(memoryview(examples.ended_batch().serialize()), ENDING)
    with pytest.raises(Rejected):
        frames.decode_batch(memoryview(ENDED.serialize()), ENDED)


def test_errors_keep_when_to_come_back_and_long_quotes_are_cut():
    told = frames.read_refusal(whole(frames.refused(1, Overloaded(Code.QUEUE_FULL, retry_after=2.5))))
    assert isinstance(told, Overloaded)
    assert told.retry_after == 2.5
    told = frames.read_refusal(whole(frames.refused(1, Rejected(Code.BAD_BATCH, "x" * 5000 + "\udc80"))))
    assert len(told.message) == 1000
    newer = encoder.encode((250, "of tomorrow", "", None))
    told = frames.read_refusal(made(frames.Kind.ERROR, newer))
    assert told.code is Code.BAD_REQUEST
    assert "of tomorrow" in told.message
