"""Channels, plain and with TLS: bytes arrive in order whatever their sizes, nothing blocks that must not, and ends are
noticed.
"""

import os
import random
import select
import socket
import ssl
import threading

import pytest
import trustme

from escrowmq.errors import Misuse
from escrowmq.wire.channel import PlainChannel, TlsChannel, client_context, connect, server_context


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of an authority, of a certificate for loopback, and of its key."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(folder / "certificate.pem", append=number > 0)
    return folder


@pytest.fixture(params=["plain", "tls"])
def ends(request, certificate):
    """A connected pair: the client's channel and the server's."""
    near, far = socket.socketpair()
    if request.param == "plain":
        pair = PlainChannel(near), PlainChannel(far)
    else:
        client = TlsChannel(near, client_context(certificate / "authority.pem"), name="localhost")
        server = server_context(certificate / "certificate.pem", certificate / "key.pem")
        pair = client, TlsChannel(far, server, server=True)
    yield pair
    for channel in pair:
        channel.close()


def send_all(channel, pieces):
    """Send everything; meanwhile another thread receives."""
    rest = [memoryview(piece) for piece in pieces]
    while rest or channel.unsent:
        taken = channel.send(rest) if rest else 0
        if not rest:
            channel.flush()
        if not taken:
            select.select([], [channel.fileno()], [], 0.01)
        while taken:
            step = min(taken, len(rest[0]))
            taken -= step
            rest[0] = rest[0][step:]
            if not rest[0]:
                rest.pop(0)


def receive(channel, size, chunk=1 << 16):
    """Receive so many bytes."""
    whole = bytearray(size)
    view = memoryview(whole)
    while view:
        count = channel.recv_into(view[:chunk], len(view))
        assert count
        view = view[count:]
    return bytes(whole)


def echo(channel, size):
    send_all(channel, [receive(channel, size)])


def beside(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("chunk", [1, 1000, 1 << 20])
@pytest.mark.parametrize("size", [1, 20_000, 3_000_000])
def test_bytes_come_back_as_they_were_sent(ends, size, chunk):
    near, far = ends
    chance = random.Random(size)
    pieces = [chance.randbytes(size // 3 or 1), b"x", bytearray(chance.randbytes(size))]
    whole = b"".join(pieces)
    if chunk == 1 and size > 20_000:
        chunk = 17
    thread = beside(echo, far, len(whole))
    sender = beside(send_all, near, pieces)
    assert receive(near, len(whole), chunk) == whole
    sender.join()
    thread.join()


def test_sending_never_waits_for_a_peer_that_does_not_receive(ends):
    near, far = ends
    greeting = beside(echo, far, 1)
    sender = beside(send_all, near, [b"x"])
    assert receive(near, 1) == b"x"  # TLS has shaken hands
    greeting.join()
    sender.join()
    block, taken = bytes(1 << 20), 0
    while (count := near.send([block])) == len(block):
        taken += count
    taken += count
    assert near.send([block]) == 0
    assert near.unsent == near.tls
    reading = beside(receive, far, taken + 1)
    send_all(near, [b"!"])
    reading.join()


def test_nothing_to_receive_raises_blocking_io_error(ends):
    near, _ = ends
    near.setblocking(False)
    with pytest.raises(BlockingIOError):
        near.recv_into(memoryview(bytearray(10)))


def test_the_end_of_the_peer_is_the_end_of_the_stream(ends):
    near, far = ends
    greeting = beside(echo, far, 1)
    sender = beside(send_all, near, [b"x"])
    assert receive(near, 1) == b"x"
    greeting.join()
    sender.join()
    far.shutdown(socket.SHUT_WR)
    assert near.recv_into(memoryview(bytearray(10))) == 0


def test_several_pieces_of_many_are_sent_in_order(ends):
    near, far = ends
    pieces = [bytes([number % 256]) * (number % 7 + 1) for number in range(500)]
    sender = beside(send_all, near, pieces)
    answering = beside(echo, far, sum(map(len, pieces)))
    assert receive(near, sum(map(len, pieces))) == b"".join(pieces)
    sender.join()
    answering.join()


@pytest.mark.parametrize("ends", ["tls"], indirect=True)
def test_the_small_pieces_of_a_frame_are_one_tls_record(ends):
    """Each record costs an encryption and a system call at both sides."""
    near, far = ends
    sender, answering = beside(send_all, near, [b"x"]), beside(echo, far, 1)
    assert receive(near, 1) == b"x"
    sender.join()
    answering.join()
    assert near.send([b"a" * 20, b"b" * 1000, b"c" * 8]) == 1028
    with socket.socket(fileno=os.dup(far.fileno())) as raw:
        waiting = raw.recv(1 << 16, socket.MSG_PEEK)
    assert len(waiting) == 5 + int.from_bytes(waiting[3:5], "big"), "the head of a record, and its bytes"
    assert receive(far, 1028) == b"a" * 20 + b"b" * 1000 + b"c" * 8


def served(certificate, act):
    """The port of a TLS server that accepts one connection and does this with its channel."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = server_context(certificate / "certificate.pem", certificate / "key.pem")

    def run():
        accepted, _ = listener.accept()
        channel = TlsChannel(accepted, context, server=True)
        try:
            act(channel)
        except OSError:
            pass
        finally:
            channel.close()
            listener.close()

    return listener.getsockname()[1], beside(run)


def test_a_certificate_of_an_unknown_authority_is_rejected(certificate):
    port, thread = served(certificate, lambda channel: channel.recv_into(memoryview(bytearray(1))))
    channel = connect("127.0.0.1", port, 60.0, client_context())
    channel.send([b"x"])
    with pytest.raises(ssl.SSLCertVerificationError):
        channel.recv_into(memoryview(bytearray(1)))
    channel.close()
    thread.join()


def test_older_protocols_than_tls_1_2_are_not_spoken(certificate):
    server = server_context(certificate / "certificate.pem", certificate / "key.pem")
    assert {server.minimum_version, client_context().minimum_version} == {ssl.TLSVersion.TLSv1_2}


def test_plain_bytes_to_a_tls_server_end_the_connection(certificate):
    failed = []

    def act(channel):
        try:
            receive(channel, 1)
        except OSError as problem:
            failed.append(problem)

    port, thread = served(certificate, act)
    channel = connect("127.0.0.1", port, 60.0)
    channel.send([b"EscrowMQ without TLS, which is long enough"])
    thread.join()
    channel.close()
    assert isinstance(failed[0], ssl.SSLError)


def test_a_unix_socket_is_connected_to_by_its_path(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        near = connect(path, 0, 60.0)
        accepted, _ = listener.accept()
        near.send([b"here"])
        assert accepted.recv(10) == b"here"
        accepted.close()
        near.close()


@pytest.mark.parametrize("name", ["missing.pem", "key.pem"])
def test_a_certificate_that_cannot_be_used_is_named(certificate, name):
    with pytest.raises(Misuse, match=name):
        server_context(certificate / name, certificate / "key.pem")
