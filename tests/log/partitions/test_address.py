"""Addresses of logs in Kafka, and the rules for their topics, without a Kafka."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, Misuse
from escrowmq.log.kafka.cluster.address import KafkaAddress, redact
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.log.kafka.cluster.topic import RULES, refuse_wrong, settings_for


def test_an_address() -> None:
    address = KafkaAddress.parse("kafka://a,b:1234,[::1]/orders.log/7?security.protocol=SASL_SSL&sasl.password=p%26w")
    assert address.servers == ("a:9092", "b:1234", "[::1]:9092")
    assert (address.topic, address.base_topic, address.partition) == ("orders.log", "orders.log.base", 7)
    assert (address.replicas, address.enough, address.name) == (3, 2, "orders.log/7")
    assert dict(address.settings) == {"security.protocol": "SASL_SSL", "sasl.password": "p&w"}
    for text in (str(address), repr(address), redact(address.url)):
        assert "p&w" not in text
        assert "p%26w" not in text
    assert str(address) == "kafka://a:9092,b:1234,[::1]:9092/orders.log/7"


@pytest.mark.parametrize(("replicas", "enough"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_more_than_half_of_the_replicas_are_enough(replicas: int, enough: int) -> None:
    address = KafkaAddress.parse(f"kafka://h/t?replication={replicas}")
    assert (address.replicas, address.enough) == (replicas, enough)


@given(
    st.lists(st.sampled_from(["a:1", "b.c:9092", "10.0.0.1:65535", "[::1]:80"]), min_size=1, max_size=3),
    st.text("Az0_-", min_size=1, max_size=9),
    st.integers(0, 999),
    st.integers(1, 9),
    st.dictionaries(st.sampled_from(["sasl.password", "ssl.ca.location"]), st.text(max_size=9)),
)
def test_what_is_written_is_read(
    servers: list[str], topic: str, partition: int, replicas: int, settings: dict[str, str]
) -> None:
    settings = {name: value.encode("utf-8", "ignore").decode() for name, value in settings.items()}
    address = KafkaAddress(tuple(servers), topic, partition, replicas, tuple(settings.items()))
    assert KafkaAddress.parse(address.url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "escrow://h/t",
        "kafka:/h/t",
        "kafka://h",
        "kafka:///t",
        "kafka://h/",
        "kafka://h,/t",
        "kafka://h:0/t",
        "kafka://h:70000/t",
        "kafka://h:port/t",
        "kafka://u:p@h/t",
        "kafka://h/a b",
        "kafka://h/..",
        "kafka://h/" + "x" * 245,
        "kafka://h/t/x",
        "kafka://h/t/-1",
        "kafka://h/t/1/2",
        "kafka://h/t/99999999999999",
        "kafka://h/t?replication=0",
        "kafka://h/t?replication=many",
        "kafka://h/t?unknown=1",
        "kafka://h/t?a.b=1&a.b=2",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(Misuse) as caught:
        KafkaAddress.parse(url)
    assert caught.value.code is Code.BAD_URL
    assert "u:p" not in str(caught.value)


ADDRESS = KafkaAddress.parse("kafka://h/t/1")
RIGHT = {**settings_for(ADDRESS), "segment.bytes": "1073741824"}


def test_a_topic_as_it_is_created_is_right() -> None:
    refuse_wrong(ADDRESS, "t", RIGHT, {0: 1, 1: 3})
    assert settings_for(ADDRESS)["min.insync.replicas"] == "2"


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("cleanup.policy", "compact"),
        ("cleanup.policy", "compact,delete"),
        ("retention.ms", "604800000"),
        ("retention.bytes", "1"),
        ("unclean.leader.election.enable", "true"),
        ("min.insync.replicas", "1"),
        ("max.message.bytes", "899000"),
        ("retention.ms", None),
    ],
)
def test_a_setting_that_would_lose_data_is_refused_with_what_to_set_it_to(setting: str, wrong: str | None) -> None:
    with pytest.raises(Misuse) as caught:
        refuse_wrong(ADDRESS, "t", {**RIGHT, setting: wrong}, {1: 3})
    assert caught.value.code is Code.BAD_SETTING
    assert f"{setting} is {wrong}" in caught.value.message
    assert f"--topic t --add-config {setting}={RIGHT[setting]}" in caught.value.hint


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(Misuse) as caught:
        refuse_wrong(ADDRESS, "t", {}, {1: 3})
    assert [rule.setting for rule in RULES if f"{rule.setting}=" not in caught.value.hint] == []


def test_too_few_replicas_are_refused_unless_the_url_says_so() -> None:
    with pytest.raises(Misuse, match=r"1 of 3 replicas.*\?replication=1"):
        refuse_wrong(ADDRESS, "t", RIGHT, {1: 1})
    with pytest.raises(Misuse, match="none with the number 1"):
        refuse_wrong(ADDRESS, "t", RIGHT, {0: 3})
    refuse_wrong(KafkaAddress.parse("kafka://h/t/1?replication=1"), "t", RIGHT, {1: 1})


def test_settings_of_the_client() -> None:
    for setting in ("linger.ms=5", "enable.idempotence=false", "group.id=x", "isolation.level=read_committed"):
        with pytest.raises(Misuse, match="is set by the log") as caught:
            open_partitions(f"kafka://h/t?{setting}")
        assert caught.value.code is Code.BAD_SETTING
    with pytest.raises(Misuse, match=r"no\.such\.thing") as caught:
        open_partitions("kafka://h/t?no.such.thing=1")
    assert caught.value.code is Code.BAD_SETTING
    with pytest.raises(Misuse, match="2 partitions"):
        create_topics("kafka://h/t/2", partitions=2)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("confluent_kafka"):
            raise ModuleNotFoundError(name, name="confluent_kafka")
        return real(name, *rest, **named)

    monkeypatch.delitem(sys.modules, "escrowmq.log.kafka.cluster.confluent", raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(Misuse, match=r"escrowmq\[kafka\]") as caught:
        open_partitions("kafka://h/t")
    assert caught.value.code is Code.MISSING_PACKAGE
