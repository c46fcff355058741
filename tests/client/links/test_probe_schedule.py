"""When a link without a connection probes for its broker, in virtual time; and a crowd of links at one node that
follows.
"""

from __future__ import annotations

import heapq
import itertools
from random import Random

import pytest

from escrowmq.broker.replicas.door import PROBES_PER_SECOND, ProbeLimit
from escrowmq.client.links.state import (
    LAST_PAUSE,
    LONGEST_REQUESTED,
    QUICK_PAUSE,
    QUICK_SECONDS,
    STEADY_SECONDS,
    ProbeSchedule,
)


def probes_until(end: float, probes: ProbeSchedule, random: Random, requested: float = 0.0) -> list[float]:
    """When a link probes that finds nobody before ``end``."""
    now, times = 0.0, []
    while now < end:
        times.append(now)
        probes.add_failure(now, random.random(), requested)
        assert probes.seconds_left(now) > 0
        now += probes.seconds_left(now)
    return times


@pytest.mark.parametrize("seed", range(20))
def test_while_another_soon_leads_probes_are_short_and_then_rare(seed: int) -> None:
    times = probes_until(60.0, ProbeSchedule(True), Random(seed))
    pauses = [(later - sooner, sooner) for sooner, later in itertools.pairwise(times)]
    assert all(pause <= 1.5 * QUICK_PAUSE for pause, since in pauses if since < QUICK_SECONDS)
    assert all(pause <= 1.5 * LAST_PAUSE for pause, _ in pauses)
    assert sum(time < QUICK_SECONDS for time in times) < 70
    assert sum(time >= QUICK_SECONDS for time in times) < 60, "a client does not go on asking so often"


def test_one_broker_alone_is_asked_at_pauses_that_double() -> None:
    assert len(probes_until(60.0, ProbeSchedule(False), Random(1))) < 60
    assert len(probes_until(6.0, ProbeSchedule(False), Random(1))) < 20


def test_a_connection_that_was_of_no_use_does_not_begin_the_count_anew() -> None:
    probes, now = ProbeSchedule(True), 0.0
    for _ in range(400):  # a broker that says that it leads, and refuses
        probes.on_connected(now)
        now += STEADY_SECONDS / 10
        probes.on_disconnected(now, 0.5, useless=True)
        now += probes.seconds_left(now)
    probes.add_failure(now, 0.5)
    assert probes.seconds_left(now) == LAST_PAUSE


@pytest.mark.parametrize("several", [False, True])
def test_a_broker_that_welcomes_and_then_refuses_is_not_asked_without_a_pause(several: bool) -> None:
    """Its disk has failed, and nobody has restarted it. Its clients can ask nobody else."""
    probes, now, connections, random = ProbeSchedule(several), 0.0, 0, Random(several)
    while now < 60.0:
        connections += 1
        probes.on_connected(now)
        now += 0.001
        probes.on_disconnected(now, random.random())
        now += probes.seconds_left(now)
    assert connections < (130 if several else 60)


def test_a_connection_that_lasted_is_replaced_at_once() -> None:
    probes = ProbeSchedule(True)
    probes_until(60.0, probes, Random(1))
    probes.on_connected(60.0)
    probes.on_disconnected(60.0 + STEADY_SECONDS, 0.5)
    assert probes.seconds_left(60.0 + STEADY_SECONDS) == 0
    probes.add_failure(62.0, 0.5)
    assert probes.seconds_left(62.0) < 0.1


def test_what_a_broker_says_is_heeded_up_to_a_bound() -> None:
    probes = ProbeSchedule(True)
    probes.add_failure(0.0, 0.5, requested=1.0)
    assert probes.seconds_left(0.0) == 1.0
    probes.add_failure(0.0, 0.5, requested=1e9)
    assert probes.seconds_left(0.0) == LONGEST_REQUESTED


@pytest.mark.parametrize("clients", [10, 300, 2000])
def test_a_crowd_does_not_drown_the_node_that_is_about_to_lead(clients: int) -> None:
    """All lose their leader at one moment, and ask the same standby until they are told to wait."""
    random, asked = Random(clients), ProbeLimit()
    links = [ProbeSchedule(True) for _ in range(clients)]
    due = [(random.random() * 0.02, number) for number in range(clients)]
    heapq.heapify(due)
    asks: list[float] = []
    while due[0][0] < 20.0:
        now, number = heapq.heappop(due)
        asks.append(now)
        links[number].add_failure(now, random.random(), asked.again_ms(now) / 1000)
        heapq.heappush(due, (now + links[number].seconds_left(now), number))
    seconds = [sum(second <= ask < second + 1 for ask in asks) for second in range(20)]
    assert all(count <= 1.5 * PROBES_PER_SECOND for count in seconds[1:])
    assert seconds[0] <= clients + 1.5 * PROBES_PER_SECOND
    assert max(seconds[1:5]) >= min(PROBES_PER_SECOND, clients / QUICK_PAUSE) / 2, "and nobody waits without need"


def test_who_is_asked_seldom_tells_nobody_to_wait() -> None:
    asked = ProbeLimit()
    assert {asked.again_ms(second * 0.1) for second in range(1000)} == {0}


def test_a_crowd_that_has_gone_is_forgotten() -> None:
    asked = ProbeLimit()
    pauses = [asked.again_ms(number / 5000) for number in range(20_000)]
    assert 1000 < max(pauses) <= 1000 * LONGEST_REQUESTED
    assert asked.again_ms(10.0) == 0
