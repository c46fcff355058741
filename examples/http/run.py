"""Everything at once: a broker with its HTTP gateway, the order service, and a cart that empties itself.

python run.py FOLDER --order o-1 [--customer ann] [--crash after-commit | before-commit]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).parent


@contextmanager
def process(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program, for as long as the block lasts."""
    told = {**os.environ, **environment}
    running = subprocess.Popen(
        [sys.executable, *words], env=told, stdout=subprocess.PIPE if environment else None, text=True
    )
    try:
        yield running
    finally:
        running.terminate()
        running.wait()
        if running.stdout is not None:
            running.stdout.close()


@contextmanager
def broker(folder: Path, service: int, secret: str) -> Iterator[str]:
    """A broker that asks the service; the address of its gateway."""
    config = folder / "escrow.toml"
    address = f"http://127.0.0.1:{service}/escrow/checks"
    config.write_text(
        f'[broker]\ntransaction_timeout = "1s"\ncheck_interval = "1s"\n'
        f'[check_back.shop]\nurl = "{address}"\nsecret_env = "CHECK_SECRET"\n'
    )
    words = (
        "-m",
        "escrowmq",
        "serve",
        "--folder",
        f"{folder}/data",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    )
    with process(*words, "--config", str(config), "--json", CHECK_SECRET=secret) as running:
        assert running.stdout is not None
        yield json.loads(running.stdout.readline())["http"]


@contextmanager
def order_service(folder: Path, port: int, gateway: str, secret: str) -> Iterator[httpx.Client]:
    """The order service, ready, and a client of it."""
    os.environ.update(GATEWAY=gateway, CHECK_SECRET=secret)
    with (
        process(str(HERE / "order_service.py"), str(folder), str(port)),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        until_ready(client)
        yield client


def until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            client.get("/healthz")
            return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def place(service: httpx.Client, order: str, customer: str, crash: str | None) -> bool:
    """Place an order; False if the service died of it."""
    try:
        answer = service.post("/orders", json={"id": order, "customer": customer, "crash": crash})
    except httpx.TransportError:
        return False
    print(
        f"order {order} is placed" if answer.status_code == 201 else f"refused: {answer.json()['detail']}", flush=True
    )
    return True


def until_decided(gateway: httpx.Client, order: str) -> str:
    """What became of the message of an order."""
    while True:
        (message,) = gateway.get("/v1/lookup", params={"key": order, "limit": 1}).json()["messages"]
        if message["state"] != "open":
            return str(message["state"])
        time.sleep(0.1)


def clear_carts(gateway: httpx.Client, folder: Path) -> None:
    """The cart system: the effect and the mark that it was done are one row, so a message that comes twice has one
    effect."""
    carts = sqlite3.connect(folder / "carts.db")
    carts.execute("CREATE TABLE IF NOT EXISTS cleared_carts (order_id TEXT PRIMARY KEY, customer TEXT)")
    path = "/v1/consumers/cart"
    while messages := gateway.post(f"{path}/receive", json={"topics": ["orders"], "wait": 1}).json()["messages"]:
        for message in messages:
            order = json.loads(base64.b64decode(message["body"]))
            with carts:
                done = carts.execute(
                    "INSERT OR IGNORE INTO cleared_carts VALUES (?, ?)", (order["id"], order["customer"])
                )
            if done.rowcount:
                print(f"the cart of {order['customer']} is cleared for order {order['id']}", flush=True)
            gateway.post(f"{path}/ack", json={"handles": [message["handle"]]}).raise_for_status()
    carts.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--order", default="o-1")
    parser.add_argument("--customer", default="ann")
    parser.add_argument("--crash", choices=["before-commit", "after-commit"])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    secret = "whsec_" + base64.b64encode(os.urandom(32)).decode()
    with socket.create_server(("127.0.0.1", 0)) as place_of_service:
        port = place_of_service.getsockname()[1]
    with (
        broker(given.folder, port, secret) as gateway,
        httpx.Client(base_url=gateway, trust_env=False, timeout=60) as escrow,
    ):
        with order_service(given.folder, port, gateway, secret) as service:
            alive = place(service, given.order, given.customer, given.crash)
        if not alive:
            print(f"the service was killed {given.crash.replace('-', ' its ')}; it is started again", flush=True)
            with order_service(given.folder, port, gateway, secret):
                print(f"the message of {given.order} is {until_decided(escrow, given.order)}", flush=True)
        clear_carts(escrow, given.folder)


if __name__ == "__main__":
    main()
