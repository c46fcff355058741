"""A broker that does not lead, in a few lines: what it says of the leader is what the test orders, true or not."""

from __future__ import annotations

import json
import threading
from typing import Any

from pyarrow import flight

from escrowmq.errors import Code, error
from escrowmq.wire import pack_error


class Standby(flight.FlightServerBase):
    """Answers ``hello`` as a standby, and everything else with NOT_LEADER.

    ``leader``, ``replicas``: what it names. ``boasts``: in ``hello`` it says that it leads, of this epoch. ``asked``: how often
    ``hello`` was asked, ``refused``: how often anything else.
    """

    def __init__(self, shard: int, leader: str | None = None, replicas: tuple[str, ...] = (), port: int = 0) -> None:
        self.shard, self.leader, self.replicas = shard, leader, replicas
        self.boasts: int | None = None
        self.asked = self.refused = 0
        self._count = threading.Lock()
        super().__init__(f"grpc+tcp://127.0.0.1:{port}")
        self.url = f"escrow://127.0.0.1:{self.port}"

    def do_action(self, context: Any, action: flight.Action) -> Any:
        if action.type != "hello":
            raise self._refusal()
        with self._count:
            self.asked += 1
        hello = {"protocol": 1, "version": "0", "shard": self.shard, "epoch": self.boasts or 1, "limits": {}}
        hello |= {"role": "leader" if self.boasts else "standby", "replicas": list(self.replicas)}
        if self.leader is not None:
            hello["leader"] = self.leader
        return iter([flight.Result(json.dumps(hello).encode())])

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise self._refusal()

    def do_get(self, context: Any, ticket: flight.Ticket) -> Any:
        raise self._refusal()

    def _refusal(self) -> flight.FlightServerError:
        with self._count:
            self.refused += 1
        problem = error(Code.NOT_LEADER, hint=self.leader or "")
        return flight.FlightServerError(str(problem), extra_info=json.dumps(pack_error(problem)).encode())

    def __exit__(self, *_: object) -> None:
        self.shutdown()
