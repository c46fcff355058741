"""The matrix over HTTP: every route of the gateway and of the metrics, without a token, with a wrong one, and in each
role, for things that exist and for things that do not."""

import json
import urllib.error
import urllib.request

import pytest
from fastapi import APIRouter, routing
from guarded_broker import RightsFile, guarded
from rights_table import CALLERS, lacking, sentence
from served import PATIENT

from escrowmq.broker.serving.http import HttpServer
from escrowmq.connecting import links
from escrowmq.gateway import app as module
from escrowmq.gateway import beside
from escrowmq.rights import failures

TOPICS = {"topics": ["TOPIC"], "wait": 0}
HANDLES = {"handles": ["SHARD-1-0"]}
MESSAGE = {"messages": [{"topic": "TOPIC", "text": "x"}]}
DECISION = {"decisions": [{"transaction_id": "OPEN", "outcome": "commit"}]}
ROUTES = {
    ("send_raw", "POST", "/v1/topics/{topic}/messages"): [(b"x", ["produce gateway", "send t"])],
    ("send", "POST", "/v1/topics/{topic}/messages"): [({"text": "x"}, ["produce gateway", "send t"])],
    ("prepare", "POST", "/v1/groups/{group}/transactions"): [(MESSAGE, ["produce shop", "send t"])],
    ("prepare_many", "POST", "/v1/groups/{group}/transactions/batch"): [
        ({"transactions": [MESSAGE]}, ["produce shop", "send t"])
    ],
    ("end_many", "POST", "/v1/groups/{group}/transactions/end"): [(DECISION, ["produce shop"])],
    ("commit", "POST", "/v1/groups/{group}/transactions/{transaction_id}/commit"): [(None, ["produce shop"])],
    ("rollback", "POST", "/v1/groups/{group}/transactions/{transaction_id}/rollback"): [(None, ["produce shop"])],
    ("show", "GET", "/v1/groups/{group}/transactions/{transaction_id}"): [(None, ["view"])],
    ("receive", "POST", "/v1/consumers/{consumers}/receive"): [
        (TOPICS, ["consume g", "read t"]),
        ({"wait": 0}, ["consume g"]),
    ],
    ("ack", "POST", "/v1/consumers/{consumers}/ack"): [(HANDLES, ["consume g"])],
    ("nack", "POST", "/v1/consumers/{consumers}/nack"): [(HANDLES, ["consume g"])],
    ("extend", "POST", "/v1/consumers/{consumers}/extend"): [({**HANDLES, "seconds": 5}, ["consume g"])],
    ("lookup", "GET", "/v1/lookup"): [
        ("?topic=TOPIC&key=k", ["read t"], ["view"]),
        ("?key=k", ["produce *"], ["view"]),
    ],
    ("view", "GET", "/v1/view"): [("?topic=TOPIC&id_or_key=k", ["read t"])],
    ("topics", "GET", "/v1/topics"): [(None, ["view"])],
    ("healthz", "GET", "/healthz"): [],
    ("openapi", "GET", "/openapi.json"): [],
    ("docs", "GET", "/docs"): [],
}
"""By name, method and path: bodies or queries, each with the rights that it needs in the order of their refusal, and
what permits it, too. Without a sample it is open to everybody."""
CASES = [
    pytest.param(route, *sample[:2], sample[2:], id=f"{route[0]}-{number}")
    for route, samples in ROUTES.items()
    for number, sample in enumerate(samples)
]


def unlisted():
    """Routes of the gateway without an entry, and entries without a route."""
    routes = getattr(routing, "iter_route_contexts", iter)(module.build(None).routes)
    found = {(one.name, method, one.path) for one in routes for method in one.methods - {"HEAD"}}
    listed = {(name, method, path.replace("{consumers}", "{group}")) for name, method, path in ROUTES}
    return found ^ listed


def test_every_route_is_in_the_table():
    assert unlisted() == set()


def test_a_new_route_without_an_entry_is_found(monkeypatch):
    router = APIRouter()
    router.include_router(module.looking.router)
    router.add_api_route("/secrets", lambda: {}, methods=["GET"], name="secrets")
    monkeypatch.setattr(module.looking, "router", router)
    assert unlisted() == {("secrets", "GET", "/v1/secrets")}


class World:
    """A gateway and a server of metrics over a broker, and what exists there."""

    def __init__(self, served, rights, http):
        self.rights, self.http = rights, http
        with served.client(token=rights.tokens["admin"]) as client:
            shard = client.hello["shard"]
            client.act("groups.subscribe", {"group": "g", "topics": ["t"]})
            session = client.act("session.open", {"group": "shop", "instance": "one", "transactional": True})["session"]
            client.prepare(session, b"half")
            [shown] = client.act("transactions.list", {"state": "open"})["transactions"]
        there = {"OPEN": shown["id"], "SHARD": f"{shard:08x}", "TOPIC": "t"}
        self.names = [there, {**there, "OPEN": f"{shard:08x}-f423f-1", "TOPIC": "gone"}]

    def ask(self, route, given, token, absent=False):
        """Status and text of a request; given a token, None for no header."""
        _, method, path = route
        names = self.names[absent]
        groups = dict.fromkeys(("group", "consumers"), "gone") if absent else {"group": "shop", "consumers": "g"}
        path = path.format(topic=names["TOPIC"], transaction_id=names["OPEN"], **groups)
        query, body = (given, None) if isinstance(given, str) else ("", given)
        raw = isinstance(body, bytes)
        text = query or ("" if raw else json.dumps(body))
        for name, value in names.items():
            text = text.replace(name, value)
        data = body if raw or body is None else text.encode()
        address = f"{self.http}{path}{text if query else ''}"
        return fetch(address, token, data, method, "octet-stream" if raw else "json")


def fetch(address, token=None, data=None, method="GET", kind="json"):
    request = urllib.request.Request(address, data, {"Content-Type": f"application/{kind}"}, method=method)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, problem.read().decode()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    rights = RightsFile(folder)
    for name, rules in CALLERS.items():
        rights.add(name, *rules)
    with guarded(folder, rights) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "DELAY_SECONDS", 0.0)  # of wrong tokens

        def connect(token):
            """None: the gateway's own connection, for its health."""
            return links(
                f"escrow://127.0.0.1:{served.port}", {"token": rights.tokens["nobody"] if token is None else token}
            )

        with beside(connect, listen="127.0.0.1:0", rights=True) as at:
            yield World(served, rights, at["http"])


def problem_of(status, text):
    """Name and message of the problem in an answer, or in its first result; None without one."""
    answer = json.loads(text)
    if status == 207:
        answer = answer["results"][0]["problem"]
    return (answer["name"], answer["message"]) if "name" in answer else None


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("route", "given", "needs", "more"), CASES)
def test_each_caller_gets_the_answer_of_the_table(world, route, given, needs, more):
    for caller, held in CALLERS.items():
        token = world.rights.tokens[caller]
        there, absent = (problem_of(*world.ask(route, given, token, one)) for one in (False, True))
        need = lacking(held, needs, *more)
        if need is None:
            assert there is None or there[0] not in ("DENIED", "UNAUTHENTICATED"), caller
            continue
        assert there == ("DENIED", sentence(caller, need)), caller
        gone = need if need.name in (None, "gateway") else need._replace(name="gone")
        assert absent == ("DENIED", sentence(caller, gone)), caller
    for token in (None, "", "emq_wrong"):
        for absent in (False, True):
            status, text = world.ask(route, given, token, absent)
            assert (status, problem_of(status, text)[0]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("route", [route for route, samples in ROUTES.items() if not samples], ids=lambda one: one[0])
def test_what_is_open_is_open_to_everybody(world, route):
    for token in (None, "emq_wrong", *world.rights.tokens.values()):
        assert world.ask(route, None, token)[0] == 200


def test_metrics_need_view_and_whatever_else_is_served_there(world, tmp_path):
    from prometheus_client import CollectorRegistry

    from escrowmq.rights import Guard

    guard = Guard(world.rights.path)
    server = HttpServer("127.0.0.1", 0, CollectorRegistry(), lambda: {"status": "ok"}, guard=guard)
    try:
        for path in ("metrics", "secrets", "healthz", "readyz"):
            address = f"http://127.0.0.1:{server.port}/{path}"
            if path in ("healthz", "readyz"):
                assert {fetch(address, token)[0] for token in (None, "x", *world.rights.tokens.values())} == {200}
                continue
            assert [fetch(address, token)[0] for token in (None, "emq_wrong")] == [401, 401]
            for caller, held in CALLERS.items():
                status, text = fetch(address, world.rights.tokens[caller])
                if need := lacking(held, ["view"]):
                    assert (status, sentence(caller, need) in text) == (403, True)
                else:
                    assert status == (200 if path == "metrics" else 404)
    finally:
        server.close()
