"""The tests' own Redis: killed and started again, it has what it acknowledged."""

from pathlib import Path

import pytest
import redis

from escrowmq_lab.servers import kafka, rabbitmq
from escrowmq_lab.servers import redis as redis_server
from escrowmq_lab.servers.seam import Absent


def test_it_survives_a_kill(tmp_path: Path, redis_url: str) -> None:
    with redis_server.serving(tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "1")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") == b"1"


def test_two_run_side_by_side(tmp_path: Path, redis_url: str) -> None:
    with redis_server.serving(tmp_path) as other:
        assert other.url != redis_url
        with redis.Redis.from_url(other.url) as there, redis.Redis.from_url(redis_url) as here:
            assert (here.ping(), there.ping()) == (True, True)


@pytest.mark.parametrize("module", [redis_server, rabbitmq, kafka])
def test_what_is_not_installed_is_named_with_its_package(
    module: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Absent, match="apt-get install"), module.serving(tmp_path):  # type: ignore[attr-defined]
        pass
