"""Memory of connections that are gone: what they were sent is freed with them, and returned to the system."""

import ctypes
import gc
import subprocess
import sys

import pyarrow as pa
import pytest
from served import Served

from escrowmq.wire.frames import Kind
from escrowmq.wire.frames.frame import frame_start

CROWD = 100
FRAME_BYTES = 2 << 20
KEPT_BYTES = CROWD * FRAME_BYTES // 4

PROGRAM = """
import json, socket, subprocess, sys, time
from escrowmq.wire import frames
from escrowmq.wire.frames.frame import frame_start

crowd, size, kept, folder = *map(int, sys.argv[1:4]), sys.argv[4]
command = [sys.executable, "-m", "escrowmq", "serve", "-l", "127.0.0.1:0", "--json", "-d", folder]
broker = subprocess.Popen([*command, "--max-held-bytes", str(6 * crowd * size)], stdout=subprocess.PIPE, text=True)
ready = json.loads(broker.stdout.readline())

def memory():
    with open(f"/proc/{ready['pid']}/status") as status:
        return int(status.read().partition("VmRSS:")[2].split()[0]) << 10

def connect():
    made = socket.create_connection(("127.0.0.1", int(ready["url"].rpartition(":")[2])))
    made.sendall(frames.hello())
    assert made.recv(1 << 16)
    return made

unfinished = frame_start(frames.Kind.SEND, 1, size) + bytes(size - 1)

def wait(reached):
    while not reached(memory() - before):
        time.sleep(0.01)

before = memory()
for count in (1, crowd):  # glibc takes the memory of the first from the system, and learns from it to keep such pieces
    connections = [connect() for _ in range(count)]
    for one in connections:
        one.sendall(unfinished)
    wait(lambda more: more > count * size * 0.9)
    for one in connections:
        one.close()
    wait(lambda more: more < kept)
broker.terminate()
sys.exit(broker.wait())
"""


@pytest.mark.invariant("I46")
def test_an_unfinished_frame_is_freed_with_its_connection(tmp_path):
    """At once: connections are cycles of objects, and their collector may come much later."""
    served, pool = Served(tmp_path / "data"), pa.system_memory_pool()
    gc.collect()
    half = pool.bytes_allocated() + FRAME_BYTES // 2
    gc.disable()
    try:
        for _ in range(3):
            with served.client() as client:
                client.send(frame_start(Kind.SEND, 1, FRAME_BYTES) + bytes(FRAME_BYTES // 2))
                served.until(lambda: pool.bytes_allocated() > half)
            served.until(lambda: pool.bytes_allocated() < half)
        assert served.room.used == 0
    finally:
        gc.enable()
        served.stop()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="reads /proc")
def test_the_memory_of_a_crowd_that_is_gone_returns_to_the_system(tmp_path):
    arguments = [str(number) for number in (CROWD, FRAME_BYTES, KEPT_BYTES)]
    command = [sys.executable, "-c", PROGRAM, *arguments, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
