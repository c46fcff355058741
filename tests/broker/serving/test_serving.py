"""A broker as a process: clean stops, the HTTP pages, metrics."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from served import Client

from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import lent_link, open_engine
from escrowmq.broker.reads.standing import standing
from escrowmq.broker.serving.http import HttpServer
from escrowmq.broker.serving.metrics import LABELLED, METRICS, registry
from escrowmq.broker.serving.serve import serve
from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Denied, Misuse
from escrowmq.model import Message
from escrowmq.platform.listening import accepts_host_name, parse_address
from escrowmq.settings import BrokerSettings
from escrowmq.testing.ledgers import outgoing
from escrowmq.wire import Exchange
from forked import Forked

PROGRAM = """
import json, sys
from pathlib import Path
from escrowmq.broker.serving.serve import serve
announce = lambda facts: print(json.dumps(facts), flush=True)
sys.exit(serve(Path(sys.argv[1]), listen="127.0.0.1:0", metrics="127.0.0.1:0", announce=announce))
"""


class Process:
    def __init__(self, folder: Path) -> None:
        self.process = Forked(
            [sys.executable, "-W", "error", "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True
        )
        self.facts = json.loads(self.process.stdout.readline())
        self.client = Client(int(self.facts["url"].rpartition(":")[2]))

    def act(self, name: str, **request) -> dict:
        return self.client.act(name, request)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process.stdout.close()
        self.client.socket.close()
        return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_clients_connected(tmp_path, number):
    broker = Process(tmp_path / "data")
    answer = broker.client.batch(Exchange.SEND, outgoing([{"body": b"x"}]))
    assert answer["code"].to_pylist() == [Code.OK]
    assert broker.end(number) == 0
    again = Process(tmp_path / "data")
    assert again.facts["shard"] == broker.facts["shard"]
    assert again.facts["epoch"] == broker.facts["epoch"] + 1
    (topic,) = again.act("topics.list")["topics"]
    assert sum(queue["end"] for queue in topic["queues"]) == 1
    assert again.end(signal.SIGTERM) == 0


def test_metrics_and_health_over_http(tmp_path):
    broker = Process(tmp_path / "data")
    broker.act("session.open", group="g", instance="i", transactional=True)
    pages = broker.facts["metrics"]
    families = {f.name: f for f in text_string_to_metric_families(fetch(f"{pages}/metrics")[1])}
    missing = [m.name for m in METRICS if f"escrowmq_{m.name}" not in families]
    assert not missing
    assert families["escrowmq_producer_groups"].samples[0].value == 1
    (open_ones,) = families["escrowmq_producer_open"].samples
    assert (open_ones.labels, open_ones.value) == ({"group": "g"}, 0)
    assert fetch(f"{pages}/healthz")[0] == fetch(f"{pages}/readyz")[0] == 200
    assert fetch(f"{pages}/other")[0] == 404
    assert broker.end(signal.SIGTERM) == 0


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, ""


@pytest.mark.parametrize(
    ("status", "alive", "ready"), [("ok", 200, 200), ("full", 200, 503), ("stopping", 200, 503), ("stopped", 503, 503)]
)
def test_health_tells_alive_from_ready(status, alive, ready):
    server = HttpServer("127.0.0.1", 0, registry(dict), lambda: {"status": status, "reason": "because"})
    try:
        assert fetch(f"http://127.0.0.1:{server.port}/healthz")[0] == alive
        assert fetch(f"http://127.0.0.1:{server.port}/readyz")[0] == ready
    finally:
        server.close()


def test_a_page_of_another_site_learns_nothing():
    """Its own name may point to this machine; it is in ``Host``, and refused."""
    server = HttpServer("127.0.0.1", 0, registry(dict), lambda: {"status": "ok", "reason": ""})
    try:
        for path in ("/metrics", "/healthz", "/readyz", "/"):
            for host, code in (
                ("evil.example", 421), ("evil.example:9090", 421), ("127.0.0.1.evil.example", 421), ("[", 421),
                (f"127.0.0.1:{server.port}", None), ("localhost", None), ("[::1]:9", None), ("10.0.0.7", None),
            ):  # fmt: skip
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                connection.request("GET", path, headers={"Host": host})
                status = connection.getresponse().status
                connection.close()
                assert (status == 421) == (code == 421), (path, host, status)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("listens", "name", "may"),
    [("127.0.0.1", "evil.example", False), ("localhost", "", False), ("127.0.0.1", "localhost", True), ("0.0.0.0",
    "broker.shop.svc", True),
     ("127.0.0.1", "192.168.0.1", True), ("::1", "::1", True)],
)  # fmt: skip
def test_names_that_a_server_may_have(listens, name, may):
    assert accepts_host_name(name, listens) is may


def test_each_topic_and_group_has_its_numbers(tmp_path):
    engine = open_engine(tmp_path, BrokerSettings(default_queues=1))
    engine.start()
    link = lent_link(tmp_path, Calls(engine))
    with Bus([link]) as bus:
        bus.producer("till").send_batch([Message("orders", b"x") for _ in range(10)])
        with bus.consumer("cart", "orders", max_attempts=1) as consumer:
            next(consumer.batches(1)).ack()
            next(consumer.batches(1)).nack(0.0, "spoilt")
            consumer.flush()
            pages = generate_latest(registry(lambda: {}, lambda: standing(engine))).decode()
    engine.stop()
    values = {}
    for family in text_string_to_metric_families(pages):
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    group = (("group", "cart"), ("topic", "orders"))
    assert values["escrowmq_consumer_lag_messages", group] == 8
    assert values["escrowmq_consumer_dead_letters", group] == 1
    assert ("escrowmq_consumer_leased", group) in values
    assert values["escrowmq_consumer_lag_seconds", group] > 0
    assert values["escrowmq_topic_messages_total", (("topic", "orders"),)] == 10
    assert {name.removeprefix("escrowmq_").removesuffix("_total") for name, _ in values} == {m.name for m in LABELLED}


def test_metrics_have_meanings_and_names_of_their_own():
    assert all(m.meaning for m in METRICS)
    assert len({m.name for m in METRICS}) == len(METRICS) == len({m.source for m in METRICS})


def test_serving_in_a_thread_until_told_to_stop(tmp_path):
    stop, announced, codes = threading.Event(), threading.Event(), []

    def run() -> None:
        codes.append(serve(tmp_path / "data", listen="127.0.0.1:0", announce=lambda _: announced.set(), stop=stop))

    thread = threading.Thread(target=run)
    thread.start()
    assert announced.wait(60)
    stop.set()
    thread.join(60)
    assert codes == [0]


def test_what_cannot_be_served(tmp_path):
    with pytest.raises(Denied):
        serve(tmp_path / "data", listen="0.0.0.0:0")
    with pytest.raises(Denied):
        serve(tmp_path / "data", listen="127.0.0.1:0", metrics="0.0.0.0:0")
    assert not (tmp_path / "data").exists()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Misuse) as caught:
        serve(tmp_path / "file", listen="127.0.0.1:0")
    assert caught.value.code == Code.NOT_A_DATA_FOLDER


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:7700", ("127.0.0.1", 7700)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "7700", ":7700", "host", "host:", "host:x", "host:65536", "host:-1"])
def test_bad_addresses(text):
    with pytest.raises(Misuse):
        parse_address(text)
