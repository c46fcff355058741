"""A broker in a process of its own, backed up while it works, killed in the middle; and the commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import Result
from typer.testing import CliRunner

import escrowmq as mq
import forked
from escrowmq.backup import BrokerSource, Manifest, restore, take, verify
from escrowmq.backup.manifest import NAME
from escrowmq.cli.failures import Exit
from escrowmq.cli.main import app
from escrowmq.platform.disk import RealDisk
from escrowmq_lab.servers.escrow import serving
from escrowmq_lab.servers.process import Server

OPTIONS = ("--segment-bytes", "256KiB", "--default-queues", "2", "--snapshot-bytes", "1MiB")


class Writers:
    """Threads that send batches, and transactions of two messages, until they are told to stop; what was acknowledged,
    by body."""

    def __init__(self, url: str, count: int = 2) -> None:
        self.mark = uuid.uuid4().hex.encode()  # the tests of this file share a broker
        self.acknowledged: set[bytes] = set()
        self.tried: set[bytes] = set()
        self._stop = threading.Event()
        self._some = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._write, args=(url, n)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _write(self, url: str, writer: int) -> None:
        with mq.connect(url) as bus:
            plain, shop = bus.producer("plain"), bus.producer("shop", unasked=True)
            for n in range(1 << 30):
                if self._stop.is_set():
                    return
                bodies = [self.mark + b"-%d-%d-%d." % (writer, n, i) + b"x" * 800 for i in range(20)]
                self.tried.update(bodies)
                try:
                    if n % 4:
                        plain.send_batch([mq.Message("t", body) for body in bodies])
                    else:
                        bodies = bodies[:1]
                        shop.commit(shop.prepare("t", bodies[0]).transaction_id)
                except mq.EscrowError:
                    continue  # the broker is being killed: nobody knows
                self.acknowledged.update(bodies)
                self._some.release()

    def wait(self, batches: int) -> set[bytes]:
        """Until so many more were acknowledged; all that are now."""
        for _ in range(batches):
            assert self._some.acquire(timeout=60)
        return set(self.acknowledged)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served"), *OPTIONS, launcher=forked.Forked) as made:
        with mq.connect(made.url) as bus:
            bus.admin.create_topic("t", 2, may_exist=True)
        yield made


def rows(url: str) -> dict[int, list[tuple[int, bytes, bytes]]]:
    """Offset, id and body of all messages, by queue."""
    with mq.connect(url, **({"read_only": True} if url.startswith("file:") else {})) as bus:
        columns = ["offset", "message_id", "body"]
        tables = {queue: bus.admin.read("t", queue, columns=columns).read_all() for queue in range(2)}
    return {queue: list(zip(*(table[name].to_pylist() for name in columns))) for queue, table in tables.items()}


def assert_prefix(server: Server, target: Path, made: Path, before: set[bytes], writers: Writers) -> Manifest:
    """What was restored is a prefix of each queue, and has everything acknowledged before the backup began."""
    verify(RealDisk(target, read_only=True))
    restored = restore(RealDisk(target, read_only=True), RealDisk(made))
    live, found = rows(server.url), rows(f"file:{made}")
    for queue, messages in found.items():
        assert messages == live[queue][: len(messages)]
    bodies = {body for messages in found.values() for _, _, body in messages}
    assert before <= bodies
    assert {body for body in bodies if body.startswith(writers.mark)} <= writers.tried
    return restored.manifest


def test_backups_of_a_broker_under_load_hold_all_that_was_acknowledged_before(server: Server, tmp_path: Path) -> None:
    """Two at once, in two folders; each brought up to date afterwards."""
    writers = Writers(server.url)
    made: list[Manifest] = []

    def back_up(name: str) -> None:
        with mq.connect(server.url) as bus:
            made.append(take(BrokerSource(bus.router.links[0]), RealDisk(tmp_path / name)))

    try:
        before = writers.wait(60)
        threads = [threading.Thread(target=back_up, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = min(made, key=lambda manifest: manifest.sequence)
        later = writers.wait(30)
        back_up("one")
    finally:
        writers.stop()
    assert assert_prefix(server, tmp_path / "one", tmp_path / "restored-one", later, writers).sequence > first.sequence
    assert_prefix(server, tmp_path / "two", tmp_path / "restored-two", before, writers)


class Killing(BrokerSource):
    """Kills the broker and starts it again, in the middle of its reads."""

    def __init__(self, server: Server, link: object) -> None:
        super().__init__(link)  # type: ignore[arg-type]
        self._server = server
        self.reads = 0

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        for piece in super().read(name, start, end):
            self.reads += 1
            if self.reads in (2, 5):
                self._server.kill()
                self._server.start()
            yield piece[: len(piece) // 2]  # a piece that did not come whole
            yield piece[len(piece) // 2 :]


def test_a_broker_that_is_killed_in_the_middle(server: Server, tmp_path: Path) -> None:
    writers = Writers(server.url)
    try:
        before = writers.wait(160)  # eight segments
        with mq.connect(server.url) as bus:
            take(source := Killing(server, bus.router.links[0]), RealDisk(tmp_path / "backup"))
        assert source.reads > 5
    finally:
        writers.stop()
    assert_prefix(server, tmp_path / "backup", tmp_path / "restored", before, writers)


# The commands


def typed(*words: str) -> Result:
    """A command in this process: Python needs not be started for it."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def killed_at(point: str, *words: str) -> None:
    """A command as a process, which is killed at a place."""
    command = [sys.executable, "-m", "escrowmq", *words]
    done = forked.run(command, env={**os.environ, "ESCROWMQ_FAILPOINT": point})
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_backup_that_is_killed_goes_on_and_none_of_its_halves_passes_for_whole(
    server: Server, tmp_path: Path
) -> None:
    place, made = str(tmp_path / "backup"), str(tmp_path / "new")
    with mq.connect(server.url) as bus:  # several segments
        for _ in range(6):
            bus.producer("plain").send_batch([mq.Message("t", b"." * 1000) for _ in range(100)])
    for point in ("backup.segment:2", "backup.copied"):
        killed_at(point, "backup", "-u", server.url, "--to", place)
        assert not (tmp_path / "backup" / NAME).exists()
    assert typed("restore", place, "--verify").exit_code == Exit.USAGE
    assert typed("restore", place, "--to", made).exit_code == Exit.USAGE
    done = typed("backup", "-u", server.url, "--to", place, "--rate", "100MiB", "--json")
    assert done.exit_code == Exit.OK, done.stderr
    manifest = json.loads(done.stdout)
    killed_at("restore.before_last", "restore", place, "--to", made)
    refused = typed("topics", "list", "-u", f"file:{made}")
    assert refused.exit_code in (Exit.USAGE, Exit.CORRUPT), refused.stdout
    told = typed("restore", place, "--to", made, "--why", "a test", "--json")
    assert told.exit_code == Exit.OK, told.stderr
    restored = json.loads(told.stdout)
    assert (restored["sequence"], restored["restored"]["shard"]) == (manifest["sequence"], manifest["shard"])
    assert restored["contents"]["topics"][0]["messages"] > 0
    assert typed("restore", place, "--to", made).exit_code == Exit.USAGE
    shown = typed("restore", place, "--verify").stdout
    assert all(text in shown for text in (f"{manifest['shard']:08x}", "queues end at", "undecided transactions"))


def test_wrong_use_is_told(server: Server, tmp_path: Path) -> None:
    target = str(tmp_path / "b")
    with mq.connect(f"file:{tmp_path / 'data'}"):
        in_use = typed("backup", "-u", f"file:{tmp_path / 'data'}", "--to", target)
    assert (in_use.exit_code, "escrow://" in in_use.stderr) == (Exit.USAGE, True)
    several = typed("backup", "-u", f"{server.url},127.0.0.1:1", "--to", target)
    assert (several.exit_code, "2 brokers" in several.stderr) == (Exit.USAGE, True)
    for rate in ("0", "fast"):
        assert typed("backup", "-u", server.url, "--to", target, "--rate", rate).exit_code == Exit.USAGE
    assert typed("backup", "-u", f"file:{tmp_path / 'none'}", "--to", target).exit_code == Exit.USAGE
    assert typed("restore", str(tmp_path / "data"), "--verify").exit_code == Exit.USAGE
    assert typed("restore", str(tmp_path / "data")).exit_code == Exit.USAGE


# What a broker gives away


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"source": "%file.../../etc/passwd", "end": 10}, "NOT_FOUND"),
        ({"source": "%file.lock", "end": 10}, "NOT_FOUND"),
        ({"source": "%file.acts.last", "end": 10}, "NOT_FOUND"),
        ({"source": "%file.", "end": 10}, "NOT_FOUND"),
        ({"source": "%file.00000000000000000000.segment"}, "BAD_REQUEST"),
        ({"source": "%file.00000000000000000000.segment", "end": 1 << 40}, "BAD_REQUEST"),
        ({"source": "%file.00000000000000000000.segment", "start": 10, "end": 5}, "BAD_REQUEST"),
        ({"source": "%file.00000000000000000000.segment", "end": 5, "key": "k"}, "BAD_REQUEST"),
        ({"source": "%file.99999999999999999999.segment", "end": 5}, "RANGE_PURGED"),
    ],
)
def test_only_files_of_the_log_are_read(server: Server, request_: dict[str, object], code: str) -> None:
    with mq.connect(server.url) as bus, pytest.raises(mq.EscrowError) as raised:
        bus.router.links[0].read(request_).read_all()  # type: ignore[arg-type]
    assert raised.value.code.name == code


def test_a_file_is_read_in_pieces(server: Server) -> None:
    with mq.connect(server.url) as bus:
        link = bus.router.links[0]
        file = link.action("backup.files", {}, 60)["segments"][0]
        whole = link.read({"source": "%file." + file["name"], "start": 0, "end": file["bytes"]}).read_all()
        part = link.read({"source": "%file." + file["name"], "start": 100, "end": 200}).read_all()
    assert part.schema == pa.schema([("start", pa.int64()), ("content", pa.binary())]) or part.num_rows == 1
    assert b"".join(whole["content"].to_pylist())[100:200] == b"".join(part["content"].to_pylist())
