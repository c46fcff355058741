"""The types of the wire are those of the code: handlers, requests and answers of every action."""

import itertools
import threading
import typing
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

import escrowmq as mq
from damaging import flip
from escrowmq.broker.actions import HANDLERS, act
from escrowmq.broker.embedded import lent_link, open_embedded
from escrowmq.broker.guarded import GuardedCalls
from escrowmq.broker.offline import READ_ONLY, OfflineLink
from escrowmq.broker.requests import checked
from escrowmq.client.admin import Admin
from escrowmq.client.async_admin import AsyncAdmin
from escrowmq.client.bus import Bus
from escrowmq.client.consuming.fetching import NO_ROWS
from escrowmq.errors import Code, Denied, Rejected
from escrowmq.platform.disk import RealDisk
from escrowmq.rights import Guard
from escrowmq.rights.tokens import new_token
from escrowmq.settings import BrokerSettings
from escrowmq.wire import OPTIONS, Exchange, ReadRequest
from escrowmq.wire.actions import brokers
from escrowmq.wire.actions.action import Answer, Nothing, Request
from escrowmq.wire.actions.table import ACTIONS
from escrowmq.wire.values import fields_of
from wire_conformance import check

PLACES = "escrowmq.broker.reads"
SETTINGS = BrokerSettings(default_queues=1, transaction_timeout=0.05, check_interval=0.05, check_max=1)


class Watched:
    """A link whose actions, options and reads are compared with their types."""

    def __init__(self, link, seen):
        self.link, self.seen, self.names = link, seen, set()

    def __getattr__(self, name):
        return getattr(self.link, name)

    def action(self, name, request, timeout):
        self.names.add(name)
        check(request, ACTIONS[name].request, f"request of {name}", self.seen)
        answer = self.link.action(name, request, timeout)
        check(answer, ACTIONS[name].answer, f"answer of {name}", self.seen)
        return answer

    def exchange(self, kind, batch, options):
        check(options, OPTIONS[kind], f"options of {kind}", self.seen)
        return self.link.exchange(kind, batch, options)

    def parcel(self, parcel, done):
        check(parcel.options, OPTIONS[parcel.kind], f"options of {parcel.kind}", self.seen)
        self.link.parcel(parcel, done)

    def read(self, request):
        check(request, ReadRequest, "read", self.seen)
        return self.link.read(request)


def everything(bus: Bus, until) -> None:
    """Use every action, so that every field of every answer has a value at least once."""
    admin = bus.admin
    admin.create_topic("t", 1, may_exist=True)
    plain, producer = bus.producer("plain", instance="p"), bus.producer("shop", checker=lambda _: mq.UNKNOWN)
    plain.send_batch([mq.Message("t", b"%d" % n, key=f"k{n}", tag="a", properties={"x": "y"}) for n in range(4)])
    bus.producer("early", qos=0).send("t", b"x")
    driven = bus.producer("driven", unasked=True, replaces=True)
    driven.rollback(driven.prepare("t", b"x").transaction_id)
    receipts = [producer.prepare("t", b"half", key=f"h{n}", tag="a", message_id=f"h{n}") for n in range(4)]
    ids = [receipt.transaction_id for receipt in receipts]
    link = bus.router.links[0]
    until(lambda: admin.transactions("parked", "shop", older_than=0.0, limit=1))
    until(lambda: not admin.transactions("open"))
    admin.recheck(ids[0], why="so")
    fresh = lambda: producer.prepare("t", b"open").transaction_id  # noqa: E731
    until(lambda: fresh() and admin.transactions("open", limit=1))
    until(lambda: admin.transaction(fresh())["state"] == "open")
    link.action("transactions.recheck", {"ids": [str(ids[0])]}, 60)
    admin.producers()
    admin.commit(ids[0], why="so")
    admin.rollback(ids[1], why="so")
    assert admin.transaction(ids[1], bodies=True, why="so")["messages"][0]["body"] == b"half"
    assert admin.lookup(message_id="h1")[0]["withheld"]
    assert [event["event"] for event in admin.transaction(ids[0])["timeline"]][:3] == ["prepared", "checked", "parked"]
    link.action("transactions.list", {"limit": 1, "after": -1, "cause": "asked_out"}, 60)
    producer.prepare("t", b"open, too")
    told = link.action("transactions.summary", {"limit": 1, "after": -1, "samples": 1, "group": "shop"}, 60)
    assert told["next"] == told["groups"][0]["number"]
    assert admin.lookup(message_id="h0")
    assert admin.lookup(key="k1", topic="t", limit=1)
    later = plain.send("t", b"later", delay=3600.0)
    plain.recall("t", later.message_id)
    assert bus.view_message("t", "k1")
    query = bus.producer("query", checker=lambda _: mq.UNKNOWN)
    query.commit_batch("query", 0, [query.prepare("t", b"of a query").transaction_id])
    assert query.last_batch("query") == 0
    assert admin.writers(limit=1)
    link.action("writers.list", {"limit": 1, "after": admin.writers()[0]["writer"]}, 60)
    consume(bus, link)
    link.action("topics.offsets", {"topic": "t", "queue": 0, "time_us": 1}, 60)
    with bus.reader("t", columns=["body"], tags="a", start="earliest") as reader:
        assert next(iter(reader))
    link.action("topics.wait", {"topic": "t", "after": [(0, 0)], "every": True, "wait_ms": 10}, 60)
    for source in ("t", "%half", "%op"):
        admin.read(source, 0, 0, 1 << 40, None, 1).read_all()
    times = {"stored_from": datetime.fromtimestamp(0, UTC), "stored_until": datetime.now(UTC)}
    admin.read("t", tags=["a"], key="k1", **times).read_all()
    admin.read("%acks", group="held").read_all()
    admin.health(), admin.stats(), admin.hello(), admin.groups(), admin.topics()
    admin.whoami(), admin.denials()
    with pytest.raises(Rejected):
        admin.step_down(why="so")
    with pytest.raises(Rejected):
        admin.reload_rights(why="so")
    opened = {"group": "shop", "instance": "x", "transactional": True}
    session = link.action("session.open", opened, 60)["session"]
    link.action("session.open", {**opened, "resume": session}, 60)
    admin.forget_writer("query", why="so")
    rules = {"transaction_timeout": 6.0, "check_interval": 30.0, "check_max": 15, "checks_exhausted": "park"}
    link.action("session.open", {**opened, "group": "made", "rules": rules}, 60)
    admin.alter_producers("made", kind="mixed", **rules)
    admin.alter_producers("made", reset=["check_max"])
    admin.producers()
    sign(bus, link)


def sign(bus, link) -> None:
    """Operators' acts: each kind with its reason, and the record of them."""
    admin = bus.admin
    admin.alter_group("dated", max_attempts=4, why="so")
    admin.alter_producers("made", check_max=3, why="so")
    admin.create_topic("short", 1)
    admin.alter_topic("short", queues=2, retention=60.0, retention_size=1_000, why="so")
    assert admin.topics()[-1]["retention_size"] == 1_000
    admin.alter_topic("short", retention="broker")
    bus.consumer("of-short", "short")
    assert not admin.delete_topic("short", force=True, check=True)[0]["deleted"]
    assert admin.delete_topic("short", force=True, why="so")[0]["groups"] == ["of-short"]
    page = link.action("acts.list", {"limit": 1, "after": 0}, 60)
    assert page["next"] == page["acts"][0]["number"]
    assert admin.acts(newest=True)
    back_up(link)
    assert admin.verify_acts()[0]["broken"] == []


def back_up(link) -> None:
    """The files of the log, and a piece of one."""
    files = link.action("backup.files", {"limit": 1}, 60)
    assert link.action("backup.files", {"after": files["segments"][-1]["name"]}, 60)["segments"] == []
    link.read({"source": "%file." + files["segments"][0]["name"], "start": 0, "end": 64}).read_all()


def consume(bus: Bus, link) -> None:
    """Consumer groups: named members with what is in doubt, dead letters."""
    admin = bus.admin
    with bus.consumer("failing", "t", tags="a", max_attempts=1, retry_backoff=0.01, retry_backoff_max=1.0) as failing:
        for message in itertools.islice(failing, 4):
            message.nack(delay=0, cause="spoilt" if message.offset else "poison")
        failing.flush()
        with bus.consumer("second", "t", tags="a", max_attempts=1) as second:
            next(iter(second)).nack(delay=0, cause="spoilt")
            second.flush()
        told = link.action("dead_letters.summary", {"group": "failing", "causes": 1, "samples": 1}, 60)
        assert told["groups"][0]["others"]["count"] == 1
        assert link.action("dead_letters.summary", {"limit": 1, "after": -1}, 60)["next"] >= 0
        page = link.action("dead_letters.list", {"group": "failing", "limit": 2}, 60)
        link.action("dead_letters.list", {"group": "failing", "after": page["next"]}, 60)
        link.action("dead_letters.settle", {"group": "failing", "act": "discard", "items": []}, 60)
        asked = {"group": "failing", "cause": "spoilt, attempt 1 of 1", "topic": "t", "older_than": 0.0}
        assert len(link.action("dead_letters.list", asked, 60)["dead_letters"]) == 3
        place = {"topic": "t", "queue": 0, "offset": 0}
        assert len(link.action("dead_letters.list", {"group": "failing", "items": [place]}, 60)["dead_letters"]) == 1
        letters = admin.dead_letters("failing", limit=2)
        assert (admin.retry_dead_letters("failing", letters[:1]), admin.discard_dead_letters("failing", why="so")) == (
            1,
            3,
        )
        for message in itertools.islice(failing, 1):
            message.nack(delay=0, cause="spoilt")
        failing.flush()
        for message in itertools.islice(failing, 1):
            message.nack(delay=0, cause="spoilt")
        failing.flush()
        changes = {"body": b"new", "key": "new", "tag": "a", "properties": {"x": "z"}, "without": ["y"], "why": "so"}
        edit = {"group": "failing", "item": admin.dead_letters("failing")[0], "message_id": b"e" * 16, **changes}
        assert admin.edit_dead_letter(**edit)["repeated"] is False
        assert admin.edit_dead_letter(**edit)["repeated"] is True
        assert admin.lookup(message_id=b"e" * 16)[0]["edited_from"] == edit["item"]["message_id"]
        of_message = admin.message_standing("t", 0, edit["item"]["offset"])[0]
        assert "edited" in [one["event"] for one in of_message["events"]]
        for message in itertools.islice(failing, 1):
            assert (message.body, message.key, message.message_id.hex()) == (b"new", "new", (b"e" * 16).hex())
            message.nack(delay=0, cause="spoilt")
        failing.flush()
        settle = {"group": "failing", "act": "discard", "all": True, "limit": 1}
        link.action(
            "dead_letters.settle", {**settle, "after": link.action("dead_letters.settle", settle, 60)["next"]}, 5
        )
        admin.members("failing")
    with bus.consumer("held", "t", in_doubt="hold", instance="one", ordered=True, prefetch=1) as held:
        next(iter(held)).ack()
        held.flush()
        with bus.consumer("held", "t", in_doubt="hold", instance="one", ordered=True, prefetch=1):
            assert [member["instance"] for member in admin.members("held")] == ["one"]
    bus.consumer("dated", "t", start="latest", redelivery="3x5min")
    change = {"topics": ["t"], "tags": ["a"], "ordered": True, "in_doubt": "hold", "start": "latest"}
    admin.alter_group("dated", **change, redelivery="broker", retry_backoff=1.0, retry_backoff_max=2.0)
    admin.alter_group("dated", redelivery="rocketmq", max_attempts=3)
    bus.consumer("leased", "t", lease=600.0).receive(1, wait=60.0)
    assert admin.members("leased")[0]["held"]
    link.exchange(Exchange.RECEIVE, NO_ROWS, {"group": "leased", "member": 3, "return_rest": True}).result(60)
    member = {"group": "held", "instance": "one", "process": 1}
    link.action("groups.join", {**member, "keep": [(0, 0)]}, 60)
    assert admin.fence("held", "one", why="so") >= 0
    operate(admin, link)


def operate(admin, link) -> None:
    """What operators do to whole groups."""
    assert admin.reset_group("failing", "earliest", topic="t", force=True, dry_run=True)
    admin.reset_group("failing", shift=-1, why="so")
    link.action("groups.reset", {"group": "failing", "topic": "t", "queue": 0, "offset": 0, "dry_run": True}, 60)
    admin.pause_group("leased", "t", why="so")
    admin.pause_group("leased")
    assert [one["paused_topics"] for one in admin.groups() if one["paused"]] == [["t"]]
    admin.resume_group("leased", why="so")
    admin.limit_group("leased", rate=0.5, in_flight=7, in_flight_per_key=3, why="so")
    assert next(group for group in admin.groups() if group["name"] == "leased")["limits"]["in_flight"] == 7
    admin.limit_group("leased")
    admin.delete_group("leased", force=True, why="so")
    link.action("groups.subscribe", {"group": "leased", "topics": ["t"]}, 60)


def see_standing(bus: Bus, monkeypatch) -> None:
    """How messages stand for groups, in each way that there is."""
    admin, places = bus.admin, [(0, n) for n in range(4)]
    admin.create_topic("standing", 1)
    bus.producer("plain").send_batch([mq.Message("standing", b"", key="same") for _ in places])
    with bus.consumer("in-order", "standing", ordered=True, max_attempts=2, retry_backoff=60.0) as consumer:
        consumer.receive(4, wait=60.0)[0].nack()
        consumer.flush()
    with bus.consumer("late", "standing", max_attempts=1) as consumer:
        first, second = consumer.receive(2, wait=60.0)
        first.nack(cause="spoilt")
        second.ack()
        consumer.flush()
        consumer.receive(1, wait=60.0)
        with bus.consumer("named", "standing", in_doubt="hold", instance="one") as named:
            named.receive(1, wait=60.0)
            assert admin.message_standing("standing", 0, 0)[0]["groups"][2]["instance"] == "one"
        found = {one["group"]: one for _, n in places for one in admin.message_standing("standing", 0, n)[0]["groups"]}
    assert found["in-order"]["behind"] == 0
    come, go = threading.Event(), threading.Event()
    policy = mq.CheckPolicy(check_interval=600.0)
    asked = bus.producer("asked", checker=lambda _: (come.set(), go.wait(60), mq.UNKNOWN)[-1], check_policy=policy)
    identity = asked.prepare("standing", b"").transaction_id
    assert come.wait(60)
    assert admin.transaction(identity)["asked_session"]
    go.set()
    for _ in bus.router.links[0].read({"source": "standing", "end": 1, "reader": "query", "batch": 1}):
        pass
    assert all(admin.standing()[0][kind] for kind in ("consumers", "readers"))
    monkeypatch.setattr(f"{PLACES}.places.MOST_GROUPS", 1)
    monkeypatch.setattr(f"{PLACES}.history.MOST_FRAMES", 0)
    (short,) = admin.message_standing("standing", 0, 0)
    assert (short["more"], len(short["groups"]), short["events"]) == (2, 1, [])


@pytest.fixture
def until():
    import time

    def wait(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait


def test_every_action_has_a_handler_and_the_other_way_round():
    assert set(HANDLERS) == set(ACTIONS)
    assert len(ACTIONS) == 49


def test_every_handler_has_the_types_of_its_action():
    for name, handler in HANDLERS.items():
        hints = typing.get_type_hints(handler)
        answer = hints.pop("return")
        engine, request = hints.values()
        own, generic = (ACTIONS[name].request, ACTIONS[name].answer), (Request, Answer)
        assert (request, answer) in (own, generic), (
            name
        )  # the type checker has compared the generic ones with the action
        assert (engine.__name__ == "Readable") == ACTIONS[name].reads_only, name


ONLY_SERVED = {
    (f"{brokers.Hello.__module__}.{name}", field)
    for name, field in (
        ("Hello", "role"),
        ("Hello", "again_ms"),
        ("Hello", "leader"),
        ("Hello", "replicas"),
        ("SteppedDown", "epoch"),
        ("SteppedDown", "seconds"),
        ("SteppedDown", "leader"),
    )
} | {("escrowmq.wire.actions.groups.Member", "address")}
"""What a broker tells only as a process: tests/broker/replicas/ looks at it."""


def test_requests_and_answers_have_their_types(tmp_path, until, monkeypatch):
    """All actions on an embedded broker and on the folder that it leaves; no field is there in name only."""
    seen = set()
    with Bus([watched := Watched(open_embedded(tmp_path / "d", SETTINGS), seen)]) as bus:
        everything(bus, until)
        see_standing(bus, monkeypatch)
    assert watched.names == set(ACTIONS)
    with Bus([at_rest := Watched(OfflineLink(tmp_path / "d"), seen)]) as bus:
        look(bus)
    assert at_rest.names == set(READ_ONLY)
    look_at_a_folder_in_use(tmp_path / "d", seen)
    look_at_edited_acts(tmp_path / "d", seen)
    look_at_damage(tmp_path / "damaged", seen)
    look_at_rights(tmp_path, seen)
    shapes = {shape for action in ACTIONS.values() for shape in nested(action.answer) | nested(action.request)}
    shapes |= {shape for one in (*OPTIONS.values(), ReadRequest) for shape in nested(one)}
    named = {(f"{shape.__module__}.{shape.__name__}", field.name) for shape in shapes for field in fields_of(shape)}
    assert sorted(named - seen - ONLY_SERVED) == []


def look_at_a_folder_in_use(folder: Path, seen) -> None:
    """The answer about a folder whose holder cannot be asked."""
    with closing(RealDisk(folder)) as held:
        held.lock()
        with Bus([Watched(OfflineLink(folder), seen)]) as bus:
            assert bus.admin.health()[0]["status"] == "incomplete"


def look_at_rights(folder: Path, seen) -> None:
    """The answers of a broker with a rights file."""
    token = new_token()
    file = folder / "rights.toml"
    entry = f'[principals.boss]\ntokens = [{{ sha256 = "{token.sha256}", expires = 2999-01-01 }}]\n'
    file.write_text(entry + 'allow = ["view", "admin"]')
    guard = Guard(file)
    with Bus([opened := open_embedded(folder / "rights", SETTINGS)]):
        opened._calls.beside["hello"] = lambda: {"rights": guard.rights.digest}
        calls = GuardedCalls(opened._calls, guard, guard.enter(token.text, (), "test", lambda: None))
        with Bus([Watched(lent_link(folder / "rights", calls), seen)]) as bus:
            assert bus.admin.hello()[0]["rights"] == bus.admin.whoami()[0]["rights"]
            with pytest.raises(Denied):
                bus.admin.pause_group("g")
            assert bus.admin.denials()[0]["denials"][0]["needs"] == "act g"
            assert not bus.admin.reload_rights(why="so")[0]["changed"]


def look_at_edited_acts(folder: Path, seen) -> None:
    """The answer about a record that somebody edited."""
    journal = folder / "acts.journal"
    journal.write_bytes(journal.read_bytes().replace(b'"why":"so"', b'"why":"no"', 1))
    with Bus([Watched(OfflineLink(folder), seen)]) as bus:
        assert [place["line"] for place in bus.admin.verify_acts()[0]["broken"]] == [1]


def look_at_damage(folder: Path, seen) -> None:
    """Answers about messages under which the log is damaged."""
    settings = BrokerSettings(segment_bytes=1 << 12)
    with Bus([Watched(open_embedded(folder, settings), seen)]) as bus:
        bus.producer("p").send("t", b"lost with all it had", key="a", message_id="lost")
        bus.producer("p").send_batch([mq.Message("t", b"its body is lost", key="b"), mq.Message("t", b"", key="c")])
        half = bus.producer("h", unasked=True).prepare("t", b"a half message that is lost")
        bus.producer("p").send("filler", bytes(5000))
        page = bus.router.links[0].action("backup.files", {"limit": 1}, 60)
        assert page["next"] == page["segments"][0]["name"]
    flip(folder, b"lost with all it had")
    flip(folder, b"its body is lost")
    flip(folder, b"a half message that is lost")
    with Bus([Watched(open_embedded(folder, settings), seen)]) as bus:
        with bus.consumer("g", "t") as consumer:
            assert next(consumer.messages(idle_timeout=60.0)).key == "c"
            assert list(consumer.messages(idle_timeout=0.5)) == []
        (shown,) = bus.admin.transaction(half.transaction_id)["messages"]
        assert (shown["message_id"], bool(shown["damaged"])) == (None, True)
        letters = bus.admin.dead_letters("g")
        assert {letter["key"] for letter in letters} == {None, "b"}
        assert {letter["attempts"] for letter in letters} == {0}
        (whole,) = bus.admin.lookup(message_id="lost")
        assert (whole["topic"], whole["message_id"], whole["body"]) == ("t", None, None)
        assert bus.router.links[0].action("lookup", {"key": "nothing"}, 60) == {"messages": [], "unreadable": 2}


def look(bus: Bus) -> None:
    """Every action that only reads."""
    admin, link = bus.admin, bus.router.links[0]
    assert [one["status"] for one in admin.health()] == ["ok"]
    admin.hello(), admin.topics(), admin.groups(), admin.producers(), admin.writers(), admin.offsets("t")
    admin.whoami(), admin.denials()
    (
        admin.members("leased"),
        admin.dead_letters("failing"),
        admin.dead_letters_summary(),
        admin.transactions_summary(),
        admin.lookup(key="k1"),
    )
    admin.transaction(admin.transactions()[0]["id"])
    bus.view_message("t", "k1")
    admin.standing(), admin.message_standing("t", 0, 0)
    link.action("topics.wait", {"topic": "t"}, 60)
    back_up(link)
    link.action("writers.show", {"writer": "query"}, 60)
    assert (len(admin.acts()) > 0, admin.verify_acts()[0]["broken"]) == (True, [])


def nested(shape) -> set:
    """A TypedDict and all those inside it."""
    found, values = {shape}, [field.value for field in fields_of(shape)]
    while values:
        value = values.pop()
        values += value.items
        if typing.is_typeddict(value.kind):
            found |= nested(value.kind)
    return found


def test_a_handler_sees_no_field_that_its_type_does_not_name():
    assert checked(Nothing, {"more": 1}) == {}
    given = {"name": "t", "queues": None, "may_exist": True, "more": 1}
    assert checked(ACTIONS["topics.create"].request, given) == {"name": "t", "may_exist": True}


@pytest.mark.parametrize(
    ("name", "request_", "says"),
    [
        ("topics.create", {}, "'name' is missing"),
        ("topics.create", {"name": "t", "queues": 0}, "'queues' must be a whole number from 1 to 2147483647, not 0"),
        ("topics.wait", {"topic": "t", "after": [[0]]}, r"'after\[0\]' must be a list of 2"),
        ("topics.wait", {"topic": "t", "after": [[0, -1]]}, r"'after\[0\]' must be a whole number from 0"),
        ("groups.subscribe", {"group": "g", "topics": ["t", 1]}, r"'topics\[1\]' must be a string"),
        (
            "groups.subscribe",
            {"group": "g", "topics": ["t"], "in_doubt": "x"},
            "must be one of redeliver, hold, not 'x'",
        ),
        ("groups.subscribe", {"group": "g", "topics": ["t"], "tags": ["\ud800"]}, r"'tags\[0\]' is not valid Unicode"),
        ("transactions.list", {"older_than": "1"}, "'older_than' must be a number of seconds"),
        ("dead_letters.settle", {"group": "g", "act": "retry", "items": [{"topic": "t"}]}, "'queue' is missing"),
        ("dead_letters.settle", {"group": "g", "act": "retry", "items": ["x"]}, r"'items\[0\]' must be an object"),
        ("session.open", {"group": "g", "instance": "i", "transactional": 1}, "must be true or false"),
    ],
)
def test_a_request_that_is_not_of_its_type_is_refused_with_the_field_named(name, request_, says):
    with pytest.raises(Rejected, match=says) as caught:
        act(None, name, request_)
    assert caught.value.code is Code.BAD_REQUEST


def test_too_many_items_are_refused_before_they_are_looked_at():
    with pytest.raises(Rejected) as caught:
        act(None, "transactions.recheck", {"ids": [None] * 100_001})
    assert caught.value.code is Code.BATCH_TOO_LARGE


def test_every_exchange_has_options():
    assert set(OPTIONS) == set(Exchange)


def test_the_async_admin_has_the_methods_of_the_blocking_one():
    assert public(AsyncAdmin) == public(Admin)
    for name in public(Admin):
        assert getattr(AsyncAdmin, name).__wrapped__ is getattr(Admin, name)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}
