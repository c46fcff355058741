"""The blocks of docs/compensation.md run, one after the other, in one program; and its loop over Redis on a real
one."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.redis import RedisTarget

PAGE = Path(__file__).parents[2] / "docs" / "compensation.md"


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str, capsys: Any, eventually: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
        assert re.match(r"COMMIT [0-9a-f]{32}\n", capsys.readouterr().out)
        with names["cart"].connect() as connection:
            assert sorted(connection.scalars(sa.text("SELECT id FROM lines"))) == ["o-1", "o-2"]
        keys_by_redis(names, redis_url, eventually)
    finally:
        for name in ("bus", "sets"):
            if name in names:
                names[name].close()
        for name in ("shop", "cart"):
            if name in names:
                names[name].dispose()


def keys_by_redis(names: dict[str, Any], url: str, eventually: Any) -> None:
    """The page's loop, and a recovery of the sets that reads the stream again."""
    announcing = names["announcing"]
    announcing.announce([bytes(16)])
    with redis.Redis.from_url(url) as client:
        client.delete("order-keys")
        target = RedisTarget(url)
        assert Relay(names["shop"], target).drain(60.0)
        target.close()
        stop = threading.Event()
        reading = threading.Thread(target=names["keys_of_redis"], args=(client, stop))
        before = names["sets"].sizes().half
        reading.start()
        try:
            eventually(lambda: names["sets"].sizes().half > before)
        finally:
            stop.set()
            reading.join()
        assert client.xpending("order-keys", "cart.keys")["pending"] == 0
        client.delete("order-keys")
