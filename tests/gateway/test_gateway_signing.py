"""Signatures: what is accepted, and what is not."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Denied, EscrowError, Misuse
from escrowmq.gateway import ReplayGuard, sign, sign_answer, verify
from escrowmq.gateway.addresses import Address, read_addresses
from escrowmq.gateway.signing import verify_answer

SECRET = b"0123456789abcdef0123"
OTHER = b"another secret of enough bytes"
NOW = 1_700_000_000.0


def test_the_signature_is_that_of_standard_webhooks() -> None:
    headers = sign(SECRET, "msg_1", b"{}", NOW)
    made = hmac.new(SECRET, b"msg_1.1700000000.{}", hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1," + base64.b64encode(made).decode(),
    }
    text = "whsec_" + base64.b64encode(SECRET).decode()
    assert sign(text, "msg_1", b"{}", NOW) == headers
    assert verify(text, {name.title(): value for name, value in headers.items()}, b"{}", now=NOW) == "msg_1"


@given(body=st.binary(max_size=200), identity=st.text("abcdef_0123456789", min_size=1), change=st.integers(0, 3))
def test_only_what_was_signed_is_accepted(body: bytes, identity: str, change: int) -> None:
    headers = sign([SECRET, OTHER], identity, body, NOW)
    for secret in (SECRET, OTHER, [OTHER, b"a third secret, quite unheard of"]):
        assert verify(secret, headers, body, now=NOW + 299) == identity
    wrong = [
        (b"a third secret, quite unheard of", headers, body),
        (SECRET, {**headers, "webhook-id": identity + "x"}, body),
        (SECRET, {**headers, "webhook-timestamp": str(int(NOW) + 1)}, body),
        (SECRET, headers, body + b" "),
    ][change]
    with pytest.raises(Denied):
        verify(*wrong, now=NOW)


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_every_header_is_needed(missing: str) -> None:
    headers = sign(SECRET, "msg_1", b"", NOW)
    del headers[missing]
    with pytest.raises(Denied):
        verify(SECRET, headers, b"", now=NOW)


@pytest.mark.parametrize("stamp", ["", "soon", "-1", "١٧٠٠٠٠٠٠٠٠", "1700000301", "1699999699", "9" * 30])
def test_a_timestamp_outside_the_window_is_refused(stamp: str) -> None:
    headers = {**sign(SECRET, "msg_1", b"", NOW), "webhook-timestamp": stamp}
    if stamp.isdecimal() and stamp.isascii() and len(stamp) < 20:
        headers = sign(SECRET, "msg_1", b"", float(stamp))
    with pytest.raises(Denied):
        verify(SECRET, headers, b"", now=NOW)


def test_a_replay_is_refused_by_the_guard_and_the_guard_forgets() -> None:
    guard = ReplayGuard(most=2)
    for number in range(5):
        headers = sign(SECRET, f"msg_{number}", b"", NOW)
        verify(SECRET, headers, b"", now=NOW, guard=guard)
        with pytest.raises(Denied, match="came before"):
            verify(SECRET, headers, b"", now=NOW + 1, guard=guard)
    assert len(guard._seen) <= 3
    fresh = ReplayGuard()
    assert fresh.first_time("a", 0.0, 10.0)
    assert not fresh.first_time("a", 9.0, 10.0)
    assert fresh.first_time("a", 10.0, 10.0)


def test_an_answer_belongs_to_its_question() -> None:
    question = sign(SECRET, "msg_1", b"?", NOW)
    answer = sign_answer(SECRET, question, b"!", NOW)
    verify_answer(SECRET, "msg_1", answer, b"!", now=NOW)
    for identity, headers, body in (
        ("msg_2", answer, b"!"),
        ("msg_1", {**answer, "webhook-id": "msg_2"}, b"!"),
        ("msg_1", answer, b"?"),
        ("msg_1", question, b"?"),
    ):
        with pytest.raises(Denied):
            verify_answer(SECRET, identity, headers, body, now=NOW)
    with pytest.raises(Denied):
        verify(SECRET, answer, b"!", now=NOW)


@pytest.mark.parametrize("secret", [b"short", "short", "", "whsec_!!!", [b"0123456789abcdef", b"x"]])
def test_weak_secrets_are_refused(secret: bytes | str) -> None:
    with pytest.raises(Misuse):
        sign(secret, "a", b"")


def test_addresses_come_from_tables_and_flags() -> None:
    tables = {"shop": {"url": "https://a/checks", "secret_env": "S", "timeout": "2s"}, "bank": {"url": "http://b:1/x"}}
    found = read_addresses(["bank=http://c/", "shop=http://d/"], tables, {"S": SECRET.decode()})
    assert found == {
        "shop": Address("shop", "http://d/", (SECRET,), 2.0),
        "bank": Address("bank", "http://c/"),
    }
    assert SECRET.decode() not in repr(found)


@pytest.mark.parametrize(
    ("flags", "tables"),
    [
        (["shop"], {}),
        (["=http://a/"], {}),
        (["shop=ftp://a/"], {}),
        (["shop=http://"], {}),
        (["shop=http://user:word@a/"], {}),
        (["shop=http://a/#x"], {}),
        (["shop=http://a:99999/"], {}),
        (["shop=http://a/\nb"], {}),
        (["shop=file:///etc/passwd"], {}),
        ([], {"shop": {}}),
        ([], {"shop": {"url": "http://a/", "secret": "in the file"}}),
        ([], {"shop": {"url": "http://a/", "secret_env": "UNSET"}}),
        ([], {"shop": {"url": "http://a/", "timeout": 0}}),
        ([], {"shop": {"url": "http://a/", "timeout": "soon"}}),
        ([], {"shop": "http://a/"}),
        ([], {"s h o p": {"url": "http://a/"}}),
    ],
)
def test_addresses_that_make_no_sense_are_refused(flags: list[str], tables: dict[str, object]) -> None:
    with pytest.raises(EscrowError):
        read_addresses(flags, tables, {})
