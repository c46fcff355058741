"""The matrix over the RocketMQ gateway: every call of its service without a key, with a wrong signature, and in each
role, for things that exist and for things that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from guarded_broker import RightsFile, guarded
from rights_table import ABSENT, CALLERS, lacking, sentence
from rocketmq_runs import RawClient
from test_rocketmq_keys import signed

from escrowmq.connecting import links
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.rocketmq.protocol import definition, service, service_grpc
from escrowmq.gateway.rocketmq.server import RocketmqOptions, beside
from escrowmq.rights import failures

Status = definition.Code
CALLS: dict[str, list[tuple[str, list[str]]]] = {
    "QueryRoute": [("", [])],
    "QueryAssignment": [("", [])],
    "Heartbeat": [("", [])],
    "NotifyClientTermination": [("", [])],
    "Telemetry": [("", [])],
    "SendMessage": [
        ("plain", ["produce rocketmq", "send t"]),
        ("transaction", ["produce rocketmq.t", "send t"]),
    ],
    "RecallMessage": [("", ["send t"])],
    "EndTransaction": [("", ["produce rocketmq.t"])],
    "ReceiveMessage": [("", ["consume g.t", "read t"])],
    "AckMessage": [("", ["consume g.t"])],
    "ChangeInvisibleDuration": [("", ["consume g.t"])],
    "ForwardMessageToDeadLetterQueue": [("", ["consume g.t"])],
}
"""By method: kinds of requests, each with the rights that it needs in the order of their refusal. Without one it tells
nothing of the broker and changes nothing of other keys; it is open to all but wrong signatures."""
REFUSED = {"GetOffset", "PullMessage", "QueryOffset", "SyncLiteSubscription", "UpdateOffset"}
"""What the gateway answers with NOT_IMPLEMENTED."""
GONE = {"t": "gone", "g.t": "gone.gone", "rocketmq.t": "rocketmq.gone"}
CASES = [
    pytest.param(name, kind, needs, id=f"{name}-{kind}".strip("-"))
    for name, kinds in CALLS.items()
    for kind, needs in kinds
]


def unlisted() -> set[str]:
    """Methods of the service without an entry, and entries without a method."""
    found = {name for name in vars(service_grpc.MessagingServiceServicer) if not name.startswith("_")}
    return found ^ (set(CALLS) | REFUSED)


def test_every_call_is_in_the_table() -> None:
    assert unlisted() == set()


def test_a_new_call_without_an_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_grpc.MessagingServiceServicer, "StealMessage", None, raising=False)
    assert unlisted() == {"StealMessage"}


class World:
    """A gateway over a broker with rights, a key for each principal, and what exists there."""

    def __init__(self, port: int, rights: RightsFile, folder: Path, stack: ExitStack) -> None:
        keys = folder / "keys.toml"
        tables = (f'[keys.{name}]\nsecret = "{name}-secret"\ntoken = "{rights.tokens[name]}"\n' for name in CALLERS)
        keys.write_text("".join(tables))
        keys.chmod(0o600)
        options = RocketmqOptions(listen="127.0.0.1:0", second="127.0.0.1:0", keys=keys, state=folder / "state")
        url = f"escrow://127.0.0.1:{port}"
        served = stack.enter_context(
            beside(lambda token: links(url, {"token": token or ""}), options, settings=GatewaySettings(), rights=True)
        )
        address = served["rocketmq"]

        def connect(*metadata: tuple[str, str]) -> RawClient:
            client = RawClient(address, metadata=metadata)
            stack.callback(client.close)
            return client

        self.clients = {name: connect(*signed(name, f"{name}-secret")) for name in CALLERS}
        self.strangers = [connect(), connect(*signed("admin", "nobody-secret")), connect(*signed("x", "x"))]
        admin = self.clients["admin"]
        half = admin.message("t", message_type=definition.TRANSACTION)
        self.transaction = admin.send(half).entries[0].transaction_id
        admin.send(admin.message("t"))
        [got] = admin.receive("g", "t")
        self.handle = got.system_properties.receipt_handle

    def ask(self, client: RawClient, name: str, kind: str, *, absent: bool = False) -> Any:
        """The status of a call."""
        topic, group = (definition.Resource(name="gone" if absent else one) for one in "tg")
        if name == "Telemetry":
            publishing = definition.Publishing(topics=[topic])
            settings = definition.Settings(client_type=definition.PRODUCER, publishing=publishing)
            answers = client.call(name, iter([service.TelemetryCommand(settings=settings)]))
            return next((one.status for one in answers if one.HasField("status")), definition.Status(code=Status.OK))
        if name == "ReceiveMessage":
            client.receive(group.name, topic.name, wait=0.0)
            return client.status
        request = getattr(service, f"{name}Request")()
        for field in request.DESCRIPTOR.fields_by_name:
            if field in ("topic", "group"):
                getattr(request, field).CopyFrom(topic if field == "topic" else group)
        if name == "SendMessage":
            sort = definition.TRANSACTION if kind == "transaction" else definition.NORMAL
            request.messages.append(client.message(topic.name, message_type=sort))
        elif name == "EndTransaction":
            request.transaction_id = self.transaction[:8] + ABSENT[8:] if absent else self.transaction
            request.resolution = definition.COMMIT
        elif name == "RecallMessage":
            request.recall_handle = "00" * 16
        elif name == "AckMessage":
            request.entries.add(receipt_handle=self.handle)
        elif "receipt_handle" in request.DESCRIPTOR.fields_by_name:
            request.receipt_handle = self.handle
        if name == "ChangeInvisibleDuration":
            request.invisible_duration.FromSeconds(60)
        return client.call(name, request).status


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("rocketmq")
    rights = RightsFile(folder)
    for name, rules in CALLERS.items():
        rights.add(name, *rules)
    with guarded(folder, rights) as served, pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(failures, "DELAY_SECONDS", 0.0)  # of wrong tokens
        yield World(served.port, rights, folder, stack)


@pytest.mark.verify
@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("name", "kind", "needs"), CASES)
def test_each_caller_gets_the_answer_of_the_table(world: World, name: str, kind: str, needs: list[str]) -> None:
    for caller, held in CALLERS.items():
        need = lacking(held, needs) if needs else None
        there = world.ask(world.clients[caller], name, kind)
        if need is None:
            assert there.code not in (Status.FORBIDDEN, Status.UNAUTHORIZED), (caller, there)
            continue
        assert (there.code, sentence(caller, need) in there.message) == (Status.FORBIDDEN, True), (caller, there)
        absent = world.ask(world.clients[caller], name, kind, absent=True)
        gone = need._replace(name=GONE.get(need.name or "", need.name))
        assert (absent.code, sentence(caller, gone) in absent.message) == (Status.FORBIDDEN, True), (caller, absent)
    for number, stranger in enumerate(world.strangers):
        expected = Status.UNAUTHORIZED if needs or number else Status.OK
        assert {world.ask(stranger, name, kind, absent=absent).code for absent in (False, True)} == {expected}


@pytest.mark.verify
@pytest.mark.parametrize("name", sorted(REFUSED - {"PullMessage"}))
def test_what_is_not_supported_says_so_to_everybody(world: World, name: str) -> None:
    for client in (*world.strangers, *world.clients.values()):
        assert world.ask(client, name, "").code == Status.NOT_IMPLEMENTED


@pytest.mark.verify
def test_whoever_guesses_secrets_must_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = world.strangers[1]
    for _ in range(failures.FREE_FAILURES + 1):
        assert world.ask(guess, "SendMessage", "plain").code == Status.UNAUTHORIZED
    monkeypatch.setattr(failures, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(failures, "MOST_WAITING", 0)
    assert world.ask(guess, "SendMessage", "plain").code == Status.TOO_MANY_REQUESTS
    assert world.ask(world.clients["admin"], "SendMessage", "plain").code == Status.OK
