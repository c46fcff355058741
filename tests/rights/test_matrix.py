"""The matrix over the protocol, with a token and with a client certificate: every call of a broker, tried with no
right, with rights for other things, with one right too few, with exactly the rights that it needs, and in each role.
A new call without an entry in the tables fails here.
"""

import ssl

import pytest
import trustme
from guarded_broker import RightsFile, guarded
from rights_table import (
    ABSENT,
    BY_ID,
    BY_SESSION,
    CALLERS,
    NO_SESSION,
    READS,
    ROWS,
    SAMPLES,
    lacking,
    sentence,
    unlisted,
)

from escrowmq.errors import Code, Denied, EscrowError
from escrowmq.rights import Access, Need, Rule
from escrowmq.rights.matrix import VIEW
from escrowmq.rights.rules import WHOLE
from escrowmq.wire import VIEWS, Exchange
from escrowmq.wire.actions import table
from escrowmq.wire.channel import server_context
from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame
from escrowmq.wire.frames.rows import encoder

ALL = ["send *", "produce *", "consume *", "read *", "act *", "view", "admin"]


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
    return [pytest.param(name, list(rules), id=name) for name, rules in table]


class World:
    """One broker with principals for every set of rules that a test needs. ``authority`` issues their certificates;
    None: they have tokens."""

    def __init__(self, served, rights, authority=None):
        self.served, self.rights, self.authority = served, rights, authority
        self.contexts = {}
        with self.caller("all") as client:
            opened = client.act("session.open", {"group": "shop", "instance": "one", "transactional": True})
            self.session = opened["session"]
            client.plain(b"x")
            client.act("groups.subscribe", {"group": "g", "topics": ["t"]})
            client.prepare(self.session, b"half")
            [shown] = client.act("transactions.list", {"state": "open"})["transactions"]
            self.open = shown["id"]

    def client(self, rules):
        return self.caller(name_of(rules))

    def caller(self, name):
        """A connection of a principal."""
        if self.authority is None:
            return self.served.client(token=self.rights.tokens[name])
        if name not in self.contexts:
            context = self.contexts[name] = ssl.create_default_context()
            self.authority.configure_trust(context)
            self.authority.issue_cert(common_name=name).configure_cert(context)
        return self.served.client(tls=self.contexts[name])

    def fill(self, request, absent=False):
        """The request with the ids of this broker; or for things that do not exist."""
        known = {"OPEN": self.open}
        if "WRITING" in request.values() and not absent:  # it is forgotten with its writer
            with self.caller("all") as client:
                opened = client.act("session.open", {"group": "spark", "instance": "one", "transactional": True})
                known["WRITING"] = opened["session"]
        if absent:
            known = {"OPEN": ABSENT, "WRITING": NO_SESSION, **dict.fromkeys(("t", "g", "shop", "w"), "gone")}
        filled = {}
        for name, value in request.items():
            if isinstance(value, list):
                filled[name] = [known.get(one, one) for one in value]
            else:
                filled[name] = known.get(value, value) if isinstance(value, str) else value
        return filled

    def call(self, client, name, absent=False, permitted=False):
        """The answer to one of ROWS: an error, or whatever came. ``permitted``: whether a watch goes on until it is
        cancelled."""
        topic, group, session = ("gone", "gone", NO_SESSION) if absent else ("t", "g", self.session)
        row = (topic, b"x", None, None, None, None, 0, 0, 0, 0, None)
        if name.startswith("send"):
            rows = [row, ("u", *row[1:])] if "two" in name else [row]
            options = {"session": session} if "session" in name else {}
            return client.answer(client.parcel(Exchange.SEND, rows, options, (5, 1)))
        if name == "prepare":
            prepared = (topic, b"x", None, None, None, None, -1, 0, 0, 0, None)
            return client.answer(client.parcel(Exchange.PREPARE, [prepared], {"session": session}, (7, 9)))
        if name == "end":
            return client.answer(client.parcel(Exchange.END, [(bytes(16), 1)], {"session": session}))
        if name == "settle":
            return client.answer(client.parcel(Exchange.SETTLE, [(1, 0, 1, 0, 0, None)], {"group": group}))
        if name == "receive":
            return client.answer(client.receive(group=group), Exchange.RECEIVE)
        number = next(client.numbers)
        client.send(frame(Kind.WATCH, number, b"", encoder.encode(session)))
        if permitted:
            client.send(frame(Kind.CANCEL, number))
        return client.answer(number)


def name_of(rules):
    return "p" + "-".join(rules).replace(" ", "_").replace("*", "ALL").replace("%", "")[:60].replace("/", "") or "p"


WAYS = ["token", pytest.param("certificate", marks=pytest.mark.verify)]


@pytest.fixture(scope="module", params=WAYS)
def world(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("matrix")
    rights = RightsFile(folder)
    principals = {name_of(ALL): ALL, "all": ALL, **CALLERS}
    every = [rules for _, rules in SAMPLES.values()] + list(READS.values()) + list(ROWS.values())
    for rules in every:
        principals |= {name_of(held): held for held in (rules, *others(rules))}
    for name, rules in principals.items():
        rights.add(name, *rules, more=f'certificates = ["{name}"]')
    if request.param == "token":
        with guarded(folder, rights) as served:
            yield World(served, rights)
        return
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "broker.pem")
    tls = server_context(folder / "broker.pem", folder / "key.pem", folder / "ca.pem")
    with guarded(folder, rights, tls=tls) as served:
        yield World(served, rights, authority)


def is_denied(call):
    """What the broker says to a caller that lacks a right, also one that does not know a session; None if it may."""
    try:
        found = call()
    except EscrowError as problem:
        found = problem
    if isinstance(found, Denied):
        assert found.code is Code.DENIED
        return found.message
    return str(found) if isinstance(found, EscrowError) and found.code is Code.UNKNOWN_SESSION else None


def test_every_call_is_in_the_tables():
    assert unlisted() == []


@pytest.mark.parametrize(("registry", "name"), [(table.ACTIONS, "topics.steal"), (VIEWS, "%secrets")])
def test_a_new_call_without_an_entry_is_found(registry, name, monkeypatch):
    monkeypatch.setitem(registry, name, next(iter(registry.values())))
    assert set(unlisted()) == {name}


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
        assert name in BY_SESSION or ("may not" in message and "it needs `" in message)


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
        assert is_denied(lambda: world.call(client, name, permitted=True)) is None
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
        assert answer.code is Code.UNKNOWN_SESSION


VIEWED = {"lookup": ["view"], "transactions.show": ["view"]}
"""What permits an action, too."""


def check_callers(world, name, rules, call, *more):
    """Each caller gets the answer of the table, and the same for what does not exist. ``call`` is given a
    connection, whether what it names is absent, and whether it is permitted."""
    for caller, held in CALLERS.items():
        need = lacking(held, rules, *more) if rules else None
        with world.caller(caller) as client:
            answers = [is_denied(lambda a=absent: call(client, a, need is None)) for absent in (False, True)]
        if need is None:
            assert answers[0] is None, caller
        elif need.name in ("shop", "spark") and name in BY_SESSION:
            assert answers[0] == answers[1], caller
            assert "UNKNOWN_SESSION" in answers[0], caller
        elif name in BY_ID:
            hidden = sentence(caller, VIEW if name.endswith("show") else Need(Access.ACT, "*"))
            assert answers == [
                hidden if lacking(held, ["view"], ["produce shop"]) else sentence(caller, need),
                hidden,
            ], caller
        else:
            absent = need if need.name is None else need._replace(name="gone")
            assert answers[0] == sentence(caller, need)
            assert answers[1] in (sentence(caller, need), sentence(caller, absent))


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("name", "rules"), cases((name, rules) for name, (_, rules) in SAMPLES.items()))
def test_each_role_may_do_an_action_or_not(world, name, rules):
    def call(client, absent, _):
        return client.act(name, world.fill(SAMPLES[name][0], absent))

    check_callers(world, name, rules, call, *([VIEWED[name]] if name in VIEWED else []))


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("source", "rules"), cases(READS.items()))
def test_each_role_may_read_or_not(world, source, rules):
    def call(client, absent, _):
        name = "gone" if absent and source == "t" else source.replace(".g", ".gone") if absent else source
        return client.read_all({"source": name, "end": 1} if name.startswith("%file") else {"source": name})

    check_callers(world, source, rules, call)


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("name", "rules"), cases(ROWS.items()))
def test_each_role_may_call_with_rows_or_not(world, name, rules):
    check_callers(world, name, rules, lambda client, *given: world.call(client, name, *given))


def test_nobody_who_is_unknown_gets_in(world):
    for token in (None, "emq_wrong"):
        tls = world.contexts["all"] if world.authority and token else None
        if world.authority is not None and tls is None:
            tls = ssl.create_default_context()
            world.authority.configure_trust(tls)
        with pytest.raises(Denied) as caught:
            world.served.client(token=token, tls=tls)
        assert caught.value.code is Code.UNAUTHENTICATED


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
