"""Meeting a broker over Arrow Flight: a connection to it, and what it says of itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

from pyarrow import flight

from escrowmq import wire
from escrowmq.client.links.addresses import Address
from escrowmq.client.links.streams import Read, flight_errors, inside
from escrowmq.errors import EscrowError
from escrowmq.wire import Json

CONNECT_SECONDS = 5.0

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client means a new connection, without gRPC's own long back-off
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


class Met:
    """A broker that answered, and the connection to it."""

    def __init__(self, address: Address, client: flight.FlightClient, hello: Json) -> None:
        self.address = address
        self.client = client
        self.hello = hello

    def close(self) -> None:
        """Let the connection go."""
        self.client.close()


def meet(address: Address) -> Met:
    """Connect, and ask. Raises EscrowError."""
    client = flight.FlightClient(f"grpc+tcp://{address.location}", generic_options=_CHANNEL)
    try:
        return Met(address, client, act(client, "hello", {}, CONNECT_SECONDS))
    except BaseException:
        client.close()
        raise


def probe(read: Read) -> None:
    """The broker may have long to look for the next batch: give the read up only if nobody is there."""
    try:
        act(read.client, "hello", {}, CONNECT_SECONDS)
    except EscrowError:
        read.cancel()


def act(client: flight.FlightClient, name: str, request: Mapping[str, object], timeout: float) -> Json:
    """One action; raises EscrowError."""
    options = flight.FlightCallOptions(timeout=timeout)
    inside.add(threading.get_ident())
    try:
        with flight_errors():
            results = list(client.do_action(flight.Action(name, json.dumps(request).encode()), options))
    finally:
        inside.discard(threading.get_ident())
    return wire.unpack_json(results[0].body.to_pybytes()) if results else {}
