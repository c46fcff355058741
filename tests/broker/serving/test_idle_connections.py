"""What connections cost that are greeted and idle: a process with five thousand of them."""

import json
import resource
import subprocess
import sys

import pytest

CONNECTIONS = 5000
MOST_BYTES = 20 << 20

PROGRAM = """
import json, resource, socket, subprocess, sys
from escrowmq.wire import frames

count, folder = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
command = [sys.executable, "-m", "escrowmq", "serve", "-l", "127.0.0.1:0", "--json", "-d", folder]
command += ["--max-connections", str(2 * count)]
broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
ready = json.loads(broker.stdout.readline())
place = "127.0.0.1", int(ready["url"].rpartition(":")[2])

def memory():
    with open(f"/proc/{ready['pid']}/status") as status:
        return int(status.read().partition("VmRSS:")[2].split()[0]) << 10

def connect():
    made = socket.create_connection(place)
    made.sendall(frames.hello())
    assert made.recv(1 << 16)
    return made

def answers(connection):
    connection.sendall(frames.ping(b"x"))
    return len(connection.recv(100)) > 0

some = [connect() for _ in range(50)]
before = memory()
idle = [connect() for _ in range(count)]
grown = memory() - before
print(json.dumps({"grown": grown, "answering": sum(map(answers, idle))}))
broker.terminate()
sys.exit(broker.wait())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_idle_connections_cost_little(tmp_path):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3 * CONNECTIONS:
        pytest.skip("this process may not have as many descriptors")
    command = [sys.executable, "-c", PROGRAM, str(CONNECTIONS), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answering"] == CONNECTIONS
    assert found["grown"] < MOST_BYTES
