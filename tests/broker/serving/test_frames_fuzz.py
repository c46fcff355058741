"""Frames that were altered at random, by the thousand: none harms the broker, holds its memory, or disturbs its
neighbours.
"""

import json
import random
import resource
import socket
import struct

import pytest
from served import PATIENT, Client, Served

from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange, Parcel, frames
from escrowmq.wire.frames import HEADER_BYTES, Kind
from escrowmq.wire.frames.frame import frame
from escrowmq.wire.frames.rows import encoder

ROW = ("t", b"x" * 50, "k", "tag", {"a": "b"}, None, -1, 0, 0, 0, None)
ON_A_CONNECTION = 40
MOST_GROWN = 200 << 10
"""KiB by which the process may grow: most of it is the ledger's, of the messages among the frames."""


def corpus():
    """One frame of each kind that a client sends, whole."""
    batch = outgoing([{"topic": "t", "body": b"y" * 80}])
    asked = [
        frames.ping(b"abc"),
        frames.cancel(3),
        frames.credit(4, 100),
        frames.parcel_request(1, Parcel(Exchange.SEND, [ROW, ROW], {}, (7, 1))),
        frames.parcel_request(2, Parcel(Exchange.PREPARE, [ROW], {"session": 1}, (7, 5))),
        frames.receive_request(5, {"group": "g", "member": 1, "wait_ms": 5}),
        frames.columns_request(6, Exchange.SEND, batch, {}),
        frames.columns_request(7, Exchange.PREPARE, batch, {"session": 1}),
        frame(Kind.ACTION, 8, json.dumps({"name": "t"}).encode(), encoder.encode("topics.list")),
        frame(Kind.READ, 9, json.dumps({"source": "t"}).encode(), encoder.encode(1 << 16)),
        frame(Kind.WATCH, 10, b"", encoder.encode(1)),
    ]
    return [
        bytes(one) if isinstance(one, bytes | bytearray) else b"".join(bytes(piece) for piece in one) for one in asked
    ]


def altered(rng, whole, number):
    """A frame with something wrong with it, or, mostly, with nothing: what comes behind a broken one is not looked
    at."""
    data = bytearray(whole)
    if struct.unpack_from("<Q", data, 8)[0]:
        struct.pack_into("<Q", data, 8, number)
    how = rng.randrange(150)
    if how > 6:
        return bytes(data)
    if how <= 1:  # anywhere
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == 2:  # in the header
        data[rng.randrange(min(HEADER_BYTES, len(data)))] = rng.randrange(256)
    elif how == 3:  # its lengths
        at = rng.randrange(0, HEADER_BYTES - 3)
        data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 1 << 16, 1 << 24, 1 << 31, (1 << 32) - 1)))
    elif how == 4:
        del data[rng.randrange(len(data)) :]
    elif how == 5:
        data += rng.randbytes(rng.randint(1, 64))
    else:  # behind the header
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(data)


def strike(port, rng, wholes):
    """One connection that greets, sends altered frames and no more, and reads to the end; how many frames."""
    with Client(port) as client:
        sent = b"".join(altered(rng, rng.choice(wholes), number) for number in range(1, ON_A_CONNECTION + 1))
        client.socket.settimeout(PATIENT)
        try:
            client.socket.sendall(sent)
            client.socket.shutdown(socket.SHUT_WR)
            while client.socket.recv(1 << 16):
                pass
        except OSError:
            pass
    return ON_A_CONNECTION


@pytest.mark.parametrize("count", [4_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(0)])])
def test_altered_frames_harm_nobody(tmp_path, count, caplog):
    seed = random.randrange(1 << 32)
    rng, wholes = random.Random(seed), corpus()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    served = Served(tmp_path / "data", max_topics=50)
    try:
        with served.client() as neighbour:
            sent, acknowledged = 0, 0
            while sent < count:
                sent += strike(served.port, rng, wholes)
                if sent % (100 * ON_A_CONNECTION) == 0:
                    acknowledged += 1
                    answer = neighbour.plain(b"mine", sequence=acknowledged)
                    assert answer[0][0] == 0, f"seed {seed}"
            served.until(lambda: len(served.server._clients) == 1)
            served.until(lambda: served.room.used == 0)
            assert neighbour.plain(b"last", sequence=acknowledged + 1)[0][0] == 0
        assert served.server.numbers()["requests_total"] > count / 20, "most of them were not reached"
    finally:
        served.stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{sent} frames, the process has grown by {grown} KiB at most")
    assert grown < MOST_GROWN, f"seed {seed}"
    failures = [one.getMessage() for one in caplog.records if one.exc_info]
    assert failures == [], f"seed {seed}"
