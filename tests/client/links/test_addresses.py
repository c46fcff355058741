"""Addresses of the brokers of a shard: how they are written, and which of those that a broker names are followed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.wire.addresses import Address, Kind, kind_of, may_follow, named_address, parse_address

LOOPBACK = ["127.0.0.1", "127.8.9.10", "::1", "localhost", "LOCALHOST.", "db.localhost", "::ffff:127.0.0.1"]
NETWORK = ["10.0.0.7", "192.168.1.2", "8.8.8.8", "2001:4860::1", "broker-1.example.org", "fd00::7", "::ffff:10.0.0.7"]
NOWHERE = ["0.0.0.0", "::", "169.254.169.254", "fe80::1", "224.0.0.1", "255.255.255.255", "::ffff:0.0.0.0", "127.1"]
NOWHERE += ["2130706433", "0x7f000001", "0177.0.0.1", "0"]


@pytest.mark.parametrize(
    ("hosts", "kind"), [(LOOPBACK, Kind.LOOPBACK), (NETWORK, Kind.NETWORK), (NOWHERE, Kind.NOWHERE)]
)
def test_which_machines_a_host_can_mean(hosts, kind):
    assert {host: kind_of(host) for host in hosts} == dict.fromkeys(hosts, kind)


def test_a_client_is_led_to_machines_of_the_kind_that_it_was_given_and_nowhere_else():
    for given_hosts, followed in ((LOOPBACK, LOOPBACK), (NETWORK, NETWORK), (NOWHERE, [])):
        for host in given_hosts:
            for named in LOOPBACK + NETWORK + NOWHERE:
                assert may_follow(Address(named, 7700), [Address(host, 1)]) is (named in followed), (host, named)


@given(st.text() | st.none() | st.integers() | st.lists(st.text(), max_size=2))
def test_what_a_broker_names_is_an_address_or_nothing(told):
    found = named_address(told)
    assert found is None or (named_address(found.url) == found and 0 < found.port < 1 << 16)


@pytest.mark.parametrize(
    "told",
    [
        "escrow://a,b",
        "escrow://a|b",
        "escrow://a:0",
        "escrow://a:70000",
        "http://a:1",
        "a:1",
        "escrow://user@a:1",
        "escrow://a/b",
        f"escrow://{'a' * 400}:1",
        "escrow://",
    ],
)
def test_what_a_broker_may_not_name(told):
    assert named_address(told) is None


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("a", "a:7700"),
        ("a:1", "a:1"),
        ("[::1]", "[::1]:7700"),
        ("[::1]:9", "[::1]:9"),
        ("127.0.0.1:80", "127.0.0.1:80"),
    ],
)
def test_an_address_as_it_is_written(text, location):
    address = parse_address(text)
    assert address is not None
    assert address.location == location
    assert parse_address(location) == address


def addresses_of(url):
    found = links(url, {})
    for link in found:
        link.close()
    return [link.address for link in found]


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("escrow://a", ["escrow://a:7700"]),
        ("escrow://a|b:1", ["escrow://a:7700|b:1"]),
        ("escrow://a|b,c|[::1]:2|d", ["escrow://a:7700|b:7700", "escrow://c:7700|[::1]:2|d:7700"]),
        ("escrow://a,b?replicas=listed", ["escrow://a:7700", "escrow://b:7700"]),
    ],
)
def test_a_link_for_each_shard_with_all_its_addresses(url, addresses):
    assert addresses_of(url) == addresses
    for address in addresses:
        assert addresses_of(address) == [address]


@pytest.mark.parametrize(
    "url",
    [
        "escrow://a|",
        "escrow://|a",
        "escrow://a||b",
        "escrow://a|a:7700",
        "escrow://a|b,b|c",
        "escrow://a|b?replicas=all",
        "escrow://a?replicas",
        "escrow://a?replicas=listed&replicas=listed",
        "escrow://" + "|".join(f"h{n}" for n in range(17)),
    ],
)
def test_urls_that_are_refused(url):
    with pytest.raises(mq.Misuse, match="BAD_URL"):
        mq.connect(url)
