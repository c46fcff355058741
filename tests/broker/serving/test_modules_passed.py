"""How many modules hand a request on, from its socket to the ledger, and its answer back. What a module calls for help
and gets back from, such as the reader of frames, hands nothing on.
"""

import sys

import pytest
from served import Served

from escrowmq.broker.serving.connection import Connection
from escrowmq.broker.writer.engine import Engine
from escrowmq.ledger.ledger import Ledger
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange

MOST = 5


def modules_above(below=""):
    """The modules of the functions that are running, those outside of ``below`` left out; and not the ledger's."""
    names, frame = [], sys._getframe(2)
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    ours = [name for name in reversed(names) if name.startswith("escrowmq.") and not name.startswith("escrowmq.ledger")]
    return ours[ours.index(below) :] if below in ours else ours


@pytest.fixture
def passed(monkeypatch):
    """The modules on the way there and on the way back."""
    found = {"there": set(), "back": set()}

    def note(owner, name, way, below=""):
        call = getattr(owner, name)

        def noted(self, *given, **named):
            found[way] |= {*modules_above(below), owner.__module__}
            return call(self, *given, **named)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((Engine, "submit"), (Engine, "submit_parcel"), (Ledger, "decide"), (Ledger, "decide_rows")):
        note(owner, name, "there")
    note(Connection, "send", "back", Engine.__module__)
    return found


@pytest.mark.parametrize("of", ["rows", "columns"])
def test_a_request_passes_few_modules_there_and_back(tmp_path, passed, of):
    served = Served(tmp_path / "data")
    try:
        with served.client() as client:
            client.plain(b"first")  # the topic is made
            for modules in passed.values():
                modules.clear()
            if of == "rows":
                assert client.plain(b"x", sequence=2)[0][0] == 0
            else:
                batch = outgoing([{"topic": "t", "body": b"x"}] * 3)
                assert client.batch(Exchange.SEND, batch).column("code").to_pylist() == [0] * 3
    finally:
        served.stop()
    ways = {way: {name for name in names if "ledger" not in name} for way, names in passed.items()}
    assert "escrowmq.broker.serving.server" in ways["there"]
    assert "escrowmq.broker.serving.connection" in ways["back"]
    assert max(map(len, ways.values())) <= MOST, ways
