"""Access keys: signatures, the file of secrets, and a gateway before a broker with access rights."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from guarded_broker import RightsFile, guarded
from rocketmq_runs import RawClient, Start

from escrowmq.errors import Code, Denied, Misuse
from escrowmq.gateway.rocketmq import clients
from escrowmq.gateway.rocketmq.access_keys import AccessKeys
from escrowmq.gateway.rocketmq.clients import Clients
from escrowmq.gateway.rocketmq.protocol import definition
from escrowmq.gateway.rocketmq.renewing import SILENT_SECONDS, Renewing
from escrowmq.model import Check, CheckedMessage, Outcome, TransactionId

Connect = Callable[..., RawClient]
Status = definition.Code
DATE = "20261127T120000Z"


def signed(name: str, secret: str, date: str = DATE) -> tuple[tuple[str, str], ...]:
    """The headers of a request, as the clients sign it."""
    signature = hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest()
    text = f"MQv2-HMAC-SHA1 Credential={name}, SignedHeaders=x-mq-date-time, Signature={signature}"
    return (("x-mq-date-time", date), ("authorization", text))


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> AccessKeys:
    (tmp_path / "b.token").write_text("emq_b\n")
    text = '[keys.A]\nsecret = "sa"\ntoken = "emq_a"\n[keys.B]\nsecret = "sb"\ntoken_file = "b.token"\n'
    return AccessKeys.read(write(tmp_path / "keys.toml", text))


def test_a_signature_stands_for_the_token_of_its_key(keys: AccessKeys) -> None:
    assert keys.bearer_of(dict(signed("A", "sa"))) == "Bearer emq_a"
    headers = dict(signed("B", "sb"))
    headers["authorization"] = headers["authorization"].replace("Credential=B", "Credential=B/region/Rocketmq")
    scheme, _, signature = headers["authorization"].rpartition("=")
    headers["authorization"] = f"{scheme}={signature.upper()}"  # as the Node client writes it
    assert keys.bearer_of(headers) == "Bearer emq_b"


def test_without_a_key_there_is_no_token(keys: AccessKeys) -> None:
    assert keys.bearer_of({}) == ""
    assert keys.bearer_of(dict(signed("", ""))) == ""  # the Python client signs even without a key


def test_wrong_signatures_are_refused(keys: AccessKeys) -> None:
    for headers in (
        dict(signed("A", "sb")),
        dict(signed("C", "sa")),
        dict(signed("A", "sa")) | {"x-mq-date-time": "20261127T120001Z"},
        {"authorization": "Bearer emq_a"},
        {"authorization": "MQv2-HMAC-SHA1 Credential=A"},
        {"authorization": "MQv2-HMAC-SHA1 Credential=A, Signature=ä"},
    ):
        with pytest.raises(Denied) as raised:
            keys.bearer_of(headers)
        assert raised.value.code is Code.UNAUTHENTICATED
        assert "emq_a" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ('[keys.A]\nsecret = "s"\ntoken = "t"\n', 0o644, "others can read"),
        ("keys = [", 0o600, "keys.toml"),
        ('[keys.A]\nsecret = "geheim"\n', 0o600, "token or token_file"),
        ('[keys.A]\nsecret = "geheim"\ntoken = "t"\ntoken_file = "f"\n', 0o600, "token or token_file"),
        ('[keys.A]\nsecret = "geheim"\ntoken_file = "missing"\n', 0o600, "token_file"),
        ('[keys.A]\nsecret = 1\ntoken = "t"\n', 0o600, "needs secret"),
        ('[keys.A]\nsecret = "geheim"\ntoken = "t"\nmore = 1\n', 0o600, "has secret"),
        ("other = 1\n", 0o600, "tables are [keys.NAME]"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(Misuse) as raised:
        AccessKeys.read(write(tmp_path / "keys.toml", text, mode))
    assert words in str(raised.value)
    assert "geheim" not in str(raised.value)


def test_secrets_are_not_shown(keys: AccessKeys) -> None:
    shown = f"{keys!r} {vars(keys)!r}"
    assert "sa" not in shown
    assert "emq_a" not in shown


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[str, RightsFile, Path]]:
    """A broker with rights, its file, and the access keys of two principals."""
    rights = RightsFile(tmp_path)
    shop = rights.add("shop", "send orders", "produce rocketmq*")
    cart = rights.add("cart", "consume cart.*", "read orders")
    text = "".join(
        f'[keys.{name}]\nsecret = "{name}-secret"\ntoken = "{token}"\n' for name, token in (("S", shop), ("C", cart))
    )
    path = write(tmp_path / "keys.toml", text)
    with guarded(tmp_path, rights, transaction_timeout=0.1, check_interval=0.1, check_max=10_000) as broker:
        yield f"escrow://127.0.0.1:{broker.port}", rights, path


def test_a_key_has_the_rights_of_its_principal(
    secured: tuple[str, RightsFile, Path], start: Start, connect: Connect
) -> None:
    url, rights, path = secured
    gateway = start("--access-keys", str(path), url=url)
    address = gateway.ready["rocketmq"]
    shop = connect(address, metadata=signed("S", "S-secret"))
    cart = connect(address, metadata=signed("C", "C-secret"))

    def codes(answer: Any) -> list[str]:
        return [Status.Name(one.status.code) for one in (answer, *answer.entries)]

    for stranger in (connect(address), connect(address, metadata=signed("S", "wrong"))):
        assert set(codes(stranger.send(stranger.message("orders")))) == {"UNAUTHORIZED"}
        assert stranger.receive("cart", "orders", wait=0.0) == []
        assert Status.Name(stranger.status.code) == "UNAUTHORIZED"
    assert codes(shop.send(shop.message("orders", b"one"))) == ["OK", "OK"]
    assert codes(shop.send(shop.message("points"))) == ["FORBIDDEN", "FORBIDDEN"]
    assert codes(cart.send(cart.message("orders"))) == ["FORBIDDEN", "FORBIDDEN"]
    assert shop.receive("cart", "orders", wait=0.0) == []
    assert Status.Name(shop.status.code) == "FORBIDDEN"
    found = cart.receive("cart", "orders")
    assert Status.Name(cart.status.code) == "OK", cart.status
    (got,) = found
    assert got.body == b"one"
    assert codes(cart.ack("cart", "orders", got)) == ["OK", "OK"]
    # A check-back comes on the stream of the key that prepared.
    stream = shop.telemetry("orders")
    half = shop.send(shop.message("orders", b"two", message_type=definition.TRANSACTION)).entries[0]
    for command in stream:
        if command.HasField("recover_orphaned_transaction_command"):
            break
    assert command.recover_orphaned_transaction_command.transaction_id == half.transaction_id
    assert cart.end("orders", half.transaction_id, definition.COMMIT) == Status.FORBIDDEN
    assert shop.end("orders", half.transaction_id, definition.COMMIT) == Status.OK
    assert [one.body for one in cart.receive("cart", "orders")] == [b"two"]
    logged = gateway.stop()
    for secret in ("S-secret", *rights.tokens.values()):
        assert secret not in logged


class _Bare:
    """A credential's gateway of which only the lease extensions are of interest."""

    def __init__(self) -> None:
        self.settler = self
        self.extended: list[str] = []

    async def settle(self, group: str, handles: list[str], *_: Any) -> list[Code]:
        self.extended += handles
        return [Code.OK] * len(handles)


@pytest.mark.invariant("I45")
def test_a_client_id_of_another_key_is_another_client() -> None:
    shop, cart = _Bare(), _Bare()
    renewing: Any = Renewing()
    renewing.add((shop, "id"), "g", ["h"])
    renewing.stop((cart, "id"), ["h"])
    renewing.drop((cart, "id"))
    asyncio.run(renewing.renew(time.monotonic()))
    assert (shop.extended, cart.extended) == (["h"], [])
    renewing.on_heartbeat((cart, "id"))
    asyncio.run(renewing.renew(time.monotonic() + SILENT_SECONDS + 1))
    assert shop.extended == ["h"], "a heartbeat of another key counted"


@pytest.mark.invariant("I45")
def test_only_the_key_that_is_asked_can_leave_a_check_back_open() -> None:
    half = CheckedMessage("t", b"x", None, None, {}, bytes(16), datetime.now(UTC))
    check = Check(TransactionId(1, 1, 1), 1, (half,))

    async def run(by: Any, outcome: Outcome) -> bool:
        """Whether the check-back ends with an answer of ``by``."""
        clients: Any = Clients(10.0, lambda given: given)
        stream = clients.enter("shop", "id")
        stream.topics.add("t")
        asking = asyncio.create_task(clients.decide("shop", check))
        await stream.take()
        clients.on_answer(by, str(check.transaction_id), outcome)
        await asyncio.wait({asking}, timeout=0)
        for _ in range(3):  # the task's own steps after its answer
            await asyncio.sleep(0)
        ended = asking.done()
        asking.cancel()
        return ended

    assert [asyncio.run(run(by, Outcome.UNKNOWN)) for by in ("shop", "cart")] == [True, False]
    assert asyncio.run(run("cart", Outcome.COMMIT)), "the broker has checked it"


def test_an_answer_reaches_a_check_back_after_an_overlapping_one_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    half = CheckedMessage("t", b"x", None, None, {}, bytes(16), datetime.now(UTC))
    check = Check(TransactionId(1, 1, 1), 1, (half,))

    async def run() -> list[Outcome]:
        made: Any = Clients(10.0, lambda given: given)
        stream = made.enter("shop", "id")
        stream.topics.add("t")
        monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.05)
        first = asyncio.create_task(made.decide("shop", check))
        await stream.take()
        monkeypatch.setattr(clients, "ANSWER_SECONDS", 60.0)
        second = asyncio.create_task(made.decide("shop", check))
        await stream.take()
        outcomes = [await first]
        made.on_answer("shop", str(check.transaction_id), Outcome.COMMIT)
        return [*outcomes, await second]

    assert asyncio.run(run()) == [Outcome.UNKNOWN, Outcome.COMMIT]
