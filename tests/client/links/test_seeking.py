"""Who leads: of brokers that name each other, lie, are silent, come late, or are of another shard."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.client.links import seeking
from escrowmq.client.links.seeking import Seeker
from escrowmq.errors import Code, Misuse, Unknown, unsent
from escrowmq.wire.addresses import MOST, Address

SHARD = 7


def at(number):
    return Address("127.0.0.1", number)


def leader(epoch=1, shard=SHARD, **more):
    return {"shard": shard, "epoch": epoch, "role": "leader", **more}


def standby(*named, shard=SHARD, leads=None):
    told = {"leader": at(leads).url} if leads else {}
    return {"shard": shard, "epoch": 1, "role": "standby", "replicas": [at(one).url for one in named], **told}


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Whoever answers at once is heard, however slow the machine."""
    for name in ("ANSWER_SECONDS", "FIRST_SECONDS", "GRACE_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(seeking, name, 60.0)
    for name in ("KEPT_SECONDS", "CALM_SECONDS"):
        monkeypatch.setattr(seeking, name, 3600.0)


class Met:
    def __init__(self, address, hello, town):
        self.address, self.hello, self._town = address, hello, town

    def close(self):
        self._town.open.remove(self)


class Town:
    """Brokers by port: what each says, or None: nobody is there, or an event until which it is silent."""

    def __init__(self, brokers):
        self.brokers = brokers
        self.asked = Counter()
        self.open = []
        self._lock = threading.Lock()

    def __call__(self, address):
        with self._lock:
            self.asked[address.port] += 1
        said = self.brokers.get(address.port)
        if isinstance(said, threading.Event):
            assert said.wait(60)
            said = None
        if said is None:
            raise unsent("connection refused")
        met = Met(address, said, self)
        with self._lock:
            self.open.append(met)
        return met


def seeker(brokers, *given_ports, **options):
    town = Town(brokers)
    return Seeker([at(port) for port in given_ports], town, **options), town


def led(found, town):
    """The port of who leads. The connections to all others are let go."""
    assert town.open == [found]
    return found.address.port


def test_a_broker_without_a_role_has_its_log_for_itself_and_leads():
    seek, town = seeker({1: {"shard": SHARD, "epoch": 3}}, 1)
    assert led(seek.seek(), town) == 1


def test_of_several_that_say_they_lead_the_one_of_the_highest_epoch_does():
    seek, town = seeker({1: leader(4), 2: standby(leads=1), 3: leader(5)}, 1, 2, 3)
    assert led(seek.seek(), town) == 3


def test_who_has_just_refused_is_believed_last(monkeypatch):
    seek, town = seeker({1: leader(9), 2: leader(4)}, 1, 2)
    seek.refused(at(1), at(2).url)
    assert led(seek.seek(), town) == 2
    town.open.clear()
    town.brokers[2] = None
    assert led(seek.seek(), town) == 1
    town.open.clear()
    town.brokers[2] = leader(4)
    monkeypatch.setattr(seeking, "CALM_SECONDS", 0.0)
    assert led(seek.seek(), town) == 1


def test_one_broker_by_two_addresses_is_one():
    seek, town = seeker({1: leader(4), 2: leader(4)}, 2, 1)
    assert led(seek.seek(), town) == 2


def test_a_standby_that_alone_was_given_names_who_leads():
    seek, town = seeker({1: standby(leads=2), 2: leader()}, 1)
    assert led(seek.seek(), town) == 2
    town.brokers |= {2: None, 1: leader(2)}
    town.open.clear()
    assert led(seek.seek(), town) == 1


def test_who_was_given_one_address_learns_the_others():
    seek, town = seeker({1: leader(replicas=[at(1).url, at(2).url])}, 1)
    assert led(seek.seek(), town) == 1
    assert town.asked == {1: 1}  # nobody is asked without need
    town.open.clear()
    town.brokers = {2: leader(2)}
    assert led(seek.seek(), town) == 2


def test_what_is_listed_alone_is_asked_where_the_user_wants_that():
    seek, town = seeker({1: standby(3, leads=3), 2: standby(3, leads=3), 3: leader()}, 1, 2, follow=False)
    with pytest.raises(Unknown, match="standby"):
        seek.seek()
    assert set(town.asked) == {1, 2}
    assert town.open == []


def test_exactly_one_broker_is_asked_whatever_it_is():
    seek, town = seeker({1: standby(leads=2), 2: leader()}, 1, follow=False)
    assert led(seek.seek(), town) == 1


@pytest.mark.parametrize(
    "named", ["escrow://10.0.0.1:7", "escrow://0.0.0.0:7", "escrow://evil.example:7", "nonsense", 7, None]
)
def test_nobody_is_led_where_he_must_not_go(named):
    seek, town = seeker({1: {**standby(), "leader": named, "replicas": [named]}}, 1)
    seek.refused(at(9), named)
    with pytest.raises(Unknown):
        seek.seek()
    assert set(town.asked) == {1}
    assert seek.known == (at(1),)


def test_names_that_lead_in_circles_and_to_nobody_are_each_asked_once():
    brokers = {1: standby(leads=2), 2: standby(3, leads=3), 3: standby(1, 2, 4, leads=1), 5: leader()}
    seek, town = seeker(brokers, 1)
    with pytest.raises(Unknown) as nobody:
        seek.seek()
    assert nobody.value.code is Code.DISCONNECTED
    assert not nobody.value.left
    assert town.asked == dict.fromkeys((1, 2, 3, 4), 1)
    assert town.open == []


def test_no_more_addresses_than_there_may_be_are_remembered_or_asked():
    brokers = {port: standby(*range(port + 1, port + 100)) for port in range(1, 400)}
    seek, town = seeker(brokers, 1, 2)
    with pytest.raises(Unknown):
        seek.seek()
    assert len(seek.known) == MOST
    assert len(town.asked) <= 2 * MOST
    assert set(town.asked.values()) == {1}


def test_a_leader_has_the_last_word_on_who_is_there():
    seek, town = seeker({1: standby(8, 9, leads=3), 3: leader(replicas=[at(1).url, at(3).url])}, 1)
    assert led(seek.seek(), town) == 3
    assert seek.known == (at(1), at(3))


def test_two_shards_behind_one_list_are_refused_and_named():
    seek, town = seeker({1: leader(), 2: leader(shard=8), 3: None}, 1, 2, 3)
    with pytest.raises(Misuse, match="BAD_URL") as raised:
        seek.seek()
    assert at(1).url in raised.value.message
    assert at(2).url in raised.value.message
    assert town.open == []
    town.brokers[2] = standby(leads=1)  # mended
    assert led(seek.seek(), town) == 1


def test_a_standby_that_does_not_know_its_shard_yet_is_no_other_shard():
    seek, town = seeker({1: leader(), 2: {**standby(shard=9), "epoch": 0}}, 1, 2)
    assert led(seek.seek(), town) == 1


def test_another_shard_at_a_known_address_counts_as_no_answer(caplog):
    seek, town = seeker({1: leader(), 2: standby(leads=1)}, 1, 2)
    seek.seek()
    town.open.clear()
    town.brokers = {1: None, 2: leader(9, shard=8)}
    for _ in range(2):
        with pytest.raises(Unknown, match="another data folder"):
            seek.seek()
    assert town.open == []
    assert sum("another data folder" in record.message for record in caplog.records) == 1  # said once


def test_a_named_address_of_another_shard_is_not_used():
    seek, town = seeker({1: standby(leads=2), 2: leader(9, shard=8)}, 1)
    with pytest.raises(Unknown, match="another shard"):
        seek.seek()
    assert town.open == []


def test_one_address_alone_may_have_another_folder_by_now():
    seek, town = seeker({1: leader()}, 1)
    seek.seek()
    town.open.clear()
    town.brokers = {1: leader(shard=8)}
    assert led(seek.seek(), town) == 1


def test_a_silent_broker_is_not_waited_for_nor_asked_twice(monkeypatch):
    monkeypatch.setattr(seeking, "ANSWER_SECONDS", 60.0)  # a wait for it would be seen
    monkeypatch.setattr(seeking, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(seeking, "GRACE_SECONDS", 0.05)
    silence = threading.Event()
    seek, town = seeker({1: silence, 2: leader()}, 1, 2)
    for _ in range(3):
        assert led(seek.seek(), town) == 2
        town.open.clear()
    assert town.asked[1] == 1
    town.brokers = {1: None, 2: standby(leads=1)}
    with pytest.raises(Unknown, match="silent"):
        seek.seek()
    silence.set()


def test_a_silent_one_is_waited_for_by_one_look_only(monkeypatch):
    """While a leader is frozen the looks at the others are short: they see at once who leads next."""
    monkeypatch.setattr(seeking, "FIRST_SECONDS", 60.0)  # a wait for the shards would be seen
    monkeypatch.setattr(seeking, "SILENT_SECONDS", 0.05)
    silence = threading.Event()
    seek, town = seeker({1: silence, 2: standby(leads=1)}, 1, 2)
    with pytest.raises(Unknown):
        seek.seek()
    monkeypatch.setattr(seeking, "SILENT_SECONDS", 60.0)  # a second wait would be seen
    monkeypatch.setattr(seeking, "GRACE_SECONDS", 60.0)
    for _ in range(5):
        with pytest.raises(Unknown, match="silent"):
            seek.seek()
    assert town.asked == {1: 1, 2: 6}
    monkeypatch.setattr(seeking, "FIRST_SECONDS", 0.05)
    town.brokers[2] = leader(2)
    assert led(seek.seek(), town) == 2
    silence.set()


def test_what_a_slow_broker_answers_between_two_looks_counts_in_the_next(monkeypatch):
    monkeypatch.setattr(seeking, "SILENT_SECONDS", 0.05)
    late, told = threading.Event(), threading.Event()

    class Late(Town):
        def __call__(self, address):
            if address.port == 1:
                assert late.wait(60)
            return super().__call__(address)

    town = Late({1: leader(2), 2: standby(leads=1)})
    seek = Seeker([at(1), at(2)], town)
    came = seek._on_answer
    monkeypatch.setattr(seek, "_on_answer", lambda *answer: (came(*answer), told.set() if answer[0] == at(1) else None))
    with pytest.raises(Unknown, match="silent"):
        seek.seek()
    late.set()
    assert told.wait(60)
    assert led(seek.seek(), town) == 1
    assert town.asked[1] == 1  # it was not asked again
    town.open.clear()
    seek.close()
    assert town.open == []


def test_what_came_long_ago_is_asked_again_and_nothing_is_left_open(monkeypatch):
    monkeypatch.setattr(seeking, "SILENT_SECONDS", 0.05)
    late, told = threading.Event(), threading.Event()

    class Late(Town):
        def __call__(self, address):
            if address.port == 1:
                assert late.wait(60)
            return super().__call__(address)

    town = Late({1: leader(2), 2: standby(leads=1)})
    seek = Seeker([at(1), at(2)], town)
    came = seek._on_answer
    monkeypatch.setattr(seek, "_on_answer", lambda *answer: (came(*answer), told.set() if answer[0] == at(1) else None))
    with pytest.raises(Unknown, match="silent"):
        seek.seek()
    late.set()
    assert told.wait(60)
    assert len(town.open) == 1
    monkeypatch.setattr(seeking, "KEPT_SECONDS", -1.0)
    monkeypatch.setattr(seeking, "SILENT_SECONDS", 60.0)
    assert led(seek.seek(), town) == 1
    assert town.asked[1] == 2


def test_those_that_follow_may_ask_to_be_left_alone():
    seek, town = seeker({1: {**standby(), "again_ms": 1500}, 2: {**standby(), "again_ms": 400}}, 1, 2)
    with pytest.raises(Unknown):
        seek.seek()
    assert seek.requested_pause == 1.5
    town.brokers = {1: {**standby(), "again_ms": "soon"}, 2: standby()}
    with pytest.raises(Unknown):
        seek.seek()
    assert seek.requested_pause == 0.0


def test_a_hint_to_a_dead_broker_costs_one_question():
    seek, town = seeker({1: standby(leads=3), 2: leader(4)}, 1, 2)
    seek.refused(at(1), at(3).url)
    assert led(seek.seek(), town) == 2
    assert town.asked == {1: 1, 2: 1, 3: 1}


def test_an_answer_that_comes_when_nobody_looks_is_let_go(monkeypatch):
    monkeypatch.setattr(seeking, "FIRST_SECONDS", 0.05)
    late, told = threading.Event(), threading.Event()

    class Late(Town):
        def __call__(self, address):
            if address.port == 1:
                assert late.wait(60)
            met = super().__call__(address)
            if address.port == 1:
                met.close = lambda: (Met.close(met), told.set())
            return met

    town = Late({1: leader(2), 2: leader()})
    seek = Seeker([at(1), at(2)], town)
    assert led(seek.seek(), town) == 2
    late.set()
    assert told.wait(60)
    assert [met.address.port for met in town.open] == [2]


def test_whether_another_leads_since_later():
    seek, town = seeker({1: leader(4), 2: standby(leads=1)}, 1, 2)
    mine = seek.seek()
    assert not seek.newer(mine)
    for hello, newer in (
        (leader(4), False),
        (leader(3), False),
        (leader(5), True),
        (leader(5, shard=8), False),
        (None, False),
    ):
        town.brokers[2] = hello
        assert seek.newer(mine) is newer
        assert town.open == [mine]
    assert town.asked[1] == 1  # it is not asked: it is silent


def test_what_goes_wrong_with_asking_is_an_answer(caplog):
    def broken(address):
        raise ZeroDivisionError

    with pytest.raises(Unknown, match="could not be asked"):
        Seeker([at(1), at(2)], broken).seek()


def test_after_closing_nobody_is_waited_for():
    silence = threading.Event()
    seek, _ = seeker({1: silence, 2: silence}, 1, 2)
    problems = []

    def work():
        try:
            seek.seek()
        except Unknown as problem:
            problems.append(problem)

    thread = threading.Thread(target=work)
    thread.start()
    seek.close()
    thread.join(60)
    assert problems
    silence.set()


PORTS = st.integers(1, 6)
HELLO = st.one_of(
    st.none(),
    st.builds(leader, st.integers(1, 5)),
    st.lists(PORTS, max_size=3).flatmap(
        lambda named: st.builds(lambda leads: standby(*named, leads=leads), st.none() | PORTS)
    ),
)


@settings(deadline=None)
@given(st.dictionaries(PORTS, HELLO, min_size=1), st.lists(PORTS, min_size=1, max_size=3, unique=True))
def test_whoever_says_what_the_highest_epoch_that_was_given_wins_and_no_connection_is_left_open(brokers, ports):
    seek, town = seeker(brokers, *ports)
    leading = {port: said for port, said in brokers.items() if said and said["role"] == "leader"}
    given_leaders = [leading[port]["epoch"] for port in ports if port in leading]
    try:
        found = seek.seek()
    except Unknown:
        assert not given_leaders
        assert town.open == []
    else:
        assert led(found, town) in leading
        assert found.hello["epoch"] >= max(given_leaders, default=0)
    assert set(town.asked.values()) == {1}
