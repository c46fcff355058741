"""The matrix: every call of a broker, tried with no right, with rights for other things, with one right too few, and
with exactly the rights that it needs. The table of samples must name every action of the protocol, so a new one without
an entry fails here.
"""

import itertools

import pytest
from guarded_broker import RightsFile, guarded

from escrowmq.errors import Code, Denied, EscrowError
from escrowmq.rights import Rule
from escrowmq.rights.matrix import ACTIONS, EXCHANGES
from escrowmq.rights.rules import WHOLE
from escrowmq.wire import VIEWS, Exchange
from escrowmq.wire.actions import table
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame
from escrowmq.wire.frames.rows import encoder

ABSENT = "00000001-1-1"
"""A transaction that no broker has."""
ALL = ["send *", "produce *", "consume *", "read *", "act *", "view", "admin"]

# Per action: a sound request, and the rules that are needed together; empty: it is open to everybody known.
SAMPLES = {
    "hello": ({}, []),
    "health": ({}, []),
    "stats": ({}, ["view"]),
    "step_down": ({"epoch": 1}, ["admin"]),
    "topics.list": ({}, ["view"]),
    "topics.offsets": ({"topic": "t"}, ["read t"]),
    "topics.wait": ({"topic": "t"}, ["read t"]),
    "topics.create": ({"name": "t2"}, ["admin"]),
    "topics.alter": ({"name": "t", "queues": 64}, ["admin"]),
    "topics.delete": ({"name": "gone", "check": True}, ["admin"]),
    "session.open": ({"group": "shop", "instance": "i"}, ["produce shop"]),
    "producers.list": ({}, ["view"]),
    "producers.alter": ({"group": "shop", "check_max": 3}, ["act shop"]),
    "groups.subscribe": ({"group": "g", "topics": ["t"]}, ["consume g", "read t"]),
    "groups.alter": ({"group": "g", "topics": ["t"]}, ["act g", "read t"]),
    "groups.reset": ({"group": "g", "start": "earliest"}, ["act g"]),
    "groups.pause": ({"group": "g"}, ["act g"]),
    "groups.resume": ({"group": "g"}, ["act g"]),
    "groups.limit": ({"group": "g", "rate": 5.0}, ["act g"]),
    "groups.delete": ({"group": "gone"}, ["admin"]),
    "groups.join": ({"group": "g", "instance": "i", "process": 1}, ["consume g"]),
    "groups.members": ({"group": "g"}, ["view"]),
    "groups.fence": ({"group": "g", "instance": "i"}, ["act g"]),
    "groups.list": ({}, ["view"]),
    "transactions.list": ({}, ["view"]),
    "transactions.summary": ({}, ["view"]),
    "transactions.show": ({"id": "OPEN"}, ["produce shop"]),
    "transactions.settle": ({"ids": ["OPEN"], "outcome": "commit"}, ["act shop"]),
    "transactions.recheck": ({"ids": ["OPEN"]}, ["act shop"]),
    "transactions.reveal": ({"id": "OPEN"}, ["act shop"]),
    "writers.commit": ({"writer": "w", "batch": 1, "transactions": [], "session": "WRITING"}, ["produce spark"]),
    "writers.show": ({"writer": "w"}, ["produce *"]),
    "writers.list": ({}, ["view"]),
    "writers.forget": ({"writer": "w"}, ["admin"]),
    "dead_letters.list": ({"group": "g"}, ["view"]),
    "dead_letters.summary": ({}, ["view"]),
    "dead_letters.edit": (
        {"group": "g", "topic": "t", "queue": 0, "offset": 0, "dead_us": 1, "message_id": "00" * 16},
        ["act g"],
    ),
    "dead_letters.settle": ({"group": "g", "act": "discard", "items": []}, ["act g"]),
    "view": ({"topic": "t", "id_or_key": "k"}, ["read t"]),
    "lookup": ({"key": "k", "topic": "t"}, ["read t"]),
    "standing": ({}, ["view"]),
    "messages.standing": ({"topic": "t", "queue": 0, "offset": 0}, ["read t"]),
    "acts.list": ({}, ["view"]),
    "acts.verify": ({}, ["view"]),
    "backup.files": ({}, ["admin"]),
    "rights.whoami": ({}, []),
    "rights.denials": ({}, ["view"]),
    "rights.reload": ({}, ["admin"]),
}
READS = {
    "t": ["read t"],
    "absent": ["read absent"],
    "%half": ["view"],
    "%op": ["view"],
    "%acks": ["view"],
    "%group-acts": ["view"],
    "%dead-letters.g": ["act g"],
    "%file.00000000000000000001.segment": ["admin"],
    "%nothing": ["view"],
}
ROWS = {
    "send": ["send t"],
    "send with a session": ["send t", "produce shop"],
    "send of two topics": ["send t", "send u"],
    "prepare": ["send t", "produce shop"],
    "end": ["produce shop"],
    "settle": ["consume g"],
    "receive": ["consume g"],
    "watch": ["produce shop"],
}


def other(rule):
    """A rule of the same access for another name, or of another access that has no name."""
    parsed = Rule.parse(rule)
    if parsed.access in WHOLE:
        return "view" if rule == "admin" else "admin"
    return f"{parsed.access} {parsed.name}x"


def others(rules):
    """Rule sets that are not enough: nothing, other names, and each of the rules left out or replaced."""
    yield []
    if rules == ["produce *"]:  # a right for any name is enough
        yield ["send *", "consume *", "view"]
        return
    yield [other(rule) for rule in rules]
    for number, rule in enumerate(rules):
        yield rules[:number] + rules[number + 1 :]
        yield [*rules[:number], other(rule), *rules[number + 1 :]]


def cases(table):
    return [(name, list(rules)) for name, rules in table]


class World:
    """One broker with principals for every set of rules that a test needs."""

    def __init__(self, served, rights):
        self.served, self.rights = served, rights
        with served.client(token=rights.tokens["all"]) as client:
            opened = client.act("session.open", {"group": "shop", "instance": "one", "transactional": True})
            self.session = opened["session"]
            opened = client.act("session.open", {"group": "spark", "instance": "one", "transactional": True})
            self.writing = opened["session"]  # of a group that is forgotten with its writer
            client.plain(b"x")
            client.act("groups.subscribe", {"group": "g", "topics": ["t"]})
            client.prepare(self.session, b"half")
            [shown] = client.act("transactions.list", {"state": "open"})["transactions"]
            self.open = shown["id"]

    def client(self, rules):
        return self.served.client(token=self.rights.tokens[name_of(rules)])

    def fill(self, request):
        known = {"OPEN": self.open, "WRITING": self.writing}
        filled = {}
        for name, value in request.items():
            if isinstance(value, list):
                filled[name] = [known.get(one, one) for one in value]
            else:
                filled[name] = known.get(value, value) if isinstance(value, str) else value
        return filled

    def call(self, client, name):
        """The answer to one of ROWS: an error, or whatever came."""
        row = ("t", b"x", None, None, None, None, 0, 0, 0, 0, None)
        if name.startswith("send"):
            rows = [row, ("u", *row[1:])] if "two" in name else [row]
            options = {"session": self.session} if "session" in name else {}
            return client.answer(client.parcel(Exchange.SEND, rows, options, (5, 1)))
        if name == "prepare":
            return client.prepare(self.session, b"x", sequence=9)
        if name == "end":
            return client.answer(client.parcel(Exchange.END, [(bytes(16), 1)], {"session": self.session}))
        if name == "settle":
            return client.answer(client.parcel(Exchange.SETTLE, [(1, 0, 1, 0, 0, None)], {"group": "g"}))
        if name == "receive":
            return client.answer(client.receive(group="g"), Exchange.RECEIVE)
        client.send(frame(Kind.WATCH, 77, b"", encoder.encode(self.session)))
        client.send(frame(Kind.CANCEL, 77))
        return client.answer(77)


def name_of(rules):
    return "p" + "-".join(rules).replace(" ", "_").replace("*", "ALL").replace("%", "")[:60].replace("/", "") or "p"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    rights = RightsFile(folder)
    rights.add(name_of(ALL), *ALL)
    rights.add("all", *ALL)
    every = [rules for _, rules in SAMPLES.values()] + list(READS.values()) + list(ROWS.values())
    for rules in every:
        for held in (rules, *others(rules)):
            rights.add(name_of(held), *held)
    with guarded(folder, rights) as served:
        yield World(served, rights)


def is_denied(call):
    try:
        found = call()
    except EscrowError as problem:
        found = problem
    if isinstance(found, Denied):
        assert found.code is Code.DENIED
        return found.message
    return None


def test_every_action_has_a_need_and_a_sample():
    assert set(ACTIONS) == set(table.ACTIONS) == set(SAMPLES)


def test_every_kind_of_call_with_rows_is_in_the_table():
    assert set(EXCHANGES) == {*map(str, Exchange), "watch"} == {name.split()[0] for name in ROWS}


def test_every_view_is_in_the_table():
    assert set(VIEWS) <= set(READS)


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("name", "rules"), cases((name, rules) for name, (_, rules) in SAMPLES.items()))
def test_an_action_needs_exactly_its_rights(world, name, rules):
    request = world.fill(SAMPLES[name][0])
    with world.client(rules) as client:
        assert is_denied(lambda: client.act(name, request)) is None
    for held in others(rules) if rules else ():
        with world.client(held) as client:
            message = is_denied(lambda client=client: client.act(name, request))
        assert message is not None, f"{held} was enough"
        assert "may not" in message
        assert "it needs `" in message


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("source", "rules"), cases(READS.items()))
def test_a_read_needs_exactly_its_right(world, source, rules):
    def read(client):
        return client.read_all({"source": source, "end": 1} if source.startswith("%file") else {"source": source})

    with world.client(rules) as client:
        assert is_denied(lambda: read(client)) is None
    for held in others(rules):
        with world.client(held) as client:
            assert is_denied(lambda client=client: read(client)) is not None, f"{held} was enough"


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("name", "rules"), cases(ROWS.items()))
def test_a_call_with_rows_needs_exactly_its_rights(world, name, rules):
    with world.client(rules) as client:
        assert is_denied(lambda: world.call(client, name)) is None
    for held in others(rules):
        with world.client(held) as client:
            assert is_denied(lambda client=client: world.call(client, name)) is not None, f"{held} was enough"


@pytest.mark.parametrize("exchange", [Exchange.SEND, Exchange.PREPARE])
def test_a_batch_needs_a_right_for_each_of_its_topics(world, exchange):
    import numpy as np
    import pyarrow as pa

    from escrowmq.schemas import OUTGOING

    columns = {
        "topic": ["t", "t", "u"],
        "body": [b"x"] * 3,
        "message_id": [bytes([1, number] * 8) for number in range(3)],
        "queue": np.zeros(3, np.int32),
    }
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(3, field.type)
        if field.nullable
        else pa.array([0] * 3, field.type)
        for field in OUTGOING
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=OUTGOING)
    with world.client(["send t", "produce shop"]) as client:
        denied = client.batch(exchange, batch, {"session": world.session})
        assert isinstance(denied, Denied)
        assert "`send u`" in denied.message
    with world.client(["send t", "send u"]) as client:
        answer = client.batch(exchange, batch, {"session": world.session})
        assert isinstance(answer, Denied)
        assert "`produce shop`" in answer.message


@pytest.mark.parametrize("name", ["topics.offsets", "groups.pause", "view", "groups.subscribe"])
def test_what_is_absent_is_denied_in_the_same_words(world, name):
    request = SAMPLES[name][0]
    absent = {field: ["gone"] if isinstance(value, list) else "gone" for field, value in request.items()}
    with world.client([]) as client:
        one = is_denied(lambda: client.act(name, world.fill(request)))
        two = is_denied(lambda: client.act(name, absent))
    for value in itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in request.values()):
        one = one.replace(f" {value}:", " gone:").replace(f" {value}`", " gone`")
    assert one == two


def test_an_unknown_transaction_is_denied_like_one_of_another_group(world):
    for name, more in (("transactions.recheck", {}), ("transactions.settle", {"outcome": "commit"})):
        with world.client(["act shopx"]) as client:
            assert is_denied(lambda c=client, n=name, m=more: c.act(n, {"ids": [world.open], **m})) is not None
            assert is_denied(lambda c=client, n=name, m=more: c.act(n, {"ids": [ABSENT], **m})) is not None


def test_a_look_up_without_view_shows_only_topics_that_the_caller_may_send_to_or_read(world):
    with world.client(["send t", "produce shop"]) as client:
        seen = client.act("lookup", {"message_id": "00000000000000070000000000000001"})["messages"]
        assert [one["topic"] for one in seen] == ["t"]
    with world.client(["produce shop"]) as client:
        assert client.act("lookup", {"message_id": "00000000000000070000000000000001"})["messages"] == []


def test_an_unknown_action_says_so_to_everybody(world):
    with world.client([]) as client, pytest.raises(EscrowError) as caught:
        client.act("topics.lits", {})
    assert caught.value.code is Code.BAD_REQUEST


def test_operator_actions_are_recorded_under_the_principal(world):
    with world.client(["act g"]) as client:
        client.act("groups.pause", {"group": "g", "by": "somebody else", "why": "because"})
        client.act("groups.resume", {"group": "g"})
    with world.client(ALL) as client:
        acts = client.act("acts.list", {"newest": True, "limit": 2})["acts"]
    assert {act["by"] for act in acts} == {name_of(["act g"])}


def test_a_request_of_the_wrong_type_is_no_way_round(world):
    with world.client([]) as client:
        for request in ({"group": 7}, {"group": None}, {}, {"group": ["g"]}):
            with pytest.raises(EscrowError) as caught:
                client.act("groups.pause", request)
            assert caught.value.code is Code.BAD_REQUEST
        for session in (True, "1", 1.0, None):
            parcel = client.parcel(Exchange.END, [(bytes(16), 1)], {"session": session})
            assert client.answer(parcel).code in (Code.BAD_REQUEST, Code.BAD_BATCH)
