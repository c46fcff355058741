"""Run a broker and the shop, place orders, and kill the shop again and again: python run.py FOLDER [--kills 3]"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).parent
ORDERS_PER_LIFE = 5


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder / "data"), "-l", "127.0.0.1:0", "--json"]
    command += ["--lease-seconds", "3"]  # after which messages of a killed shop come again
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield json.loads(running.stdout.readline())["url"]
        finally:
            running.terminate()


@contextmanager
def shop(port: int) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--port", str(port), "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, cwd=HERE) as running, httpx.Client(base_url=url, trust_env=False) as client:
        try:
            until_ready(running, client)
            yield running, client
        finally:
            running.terminate()


def until_ready(running: subprocess.Popen[bytes], client: httpx.Client) -> None:
    while True:
        try:
            client.get("/healthz")
            return
        except httpx.TransportError:
            if running.poll() is not None:
                raise SystemExit("the shop did not start") from None
            time.sleep(0.05)


def place_orders(client: httpx.Client, life: int) -> None:
    for number in range(ORDERS_PER_LIFE):
        order = {"id": f"o-{life}-{number}", "customer": "ann"}
        client.post("/orders", json=order).raise_for_status()


def cleared(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return [order for (order,) in connection.execute('SELECT "order" FROM cleared_carts')]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    wanted = (given.kills + 1) * ORDERS_PER_LIFE
    with broker(folder) as url:
        os.environ.update(ESCROWMQ_URL=url, SHOP_DATABASE=f"sqlite:///{folder}/shop.db")
        for life in range(given.kills + 1):
            with shop(port) as (running, client):
                place_orders(client, life)
                if life < given.kills:
                    running.kill()  # some messages are in the outbox, some at the broker, some half handled
                else:
                    while len(set(cleared(folder / "shop.db"))) < wanted:
                        time.sleep(0.05)
    found = cleared(folder / "shop.db")
    print(f"{wanted} orders were placed, and the shop was killed {given.kills} times")
    print(f"{len(set(found))} carts are cleared, {len(found) - len(set(found))} of them twice")


if __name__ == "__main__":
    main()
