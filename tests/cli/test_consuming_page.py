"""The program of docs/consuming.md, run and stopped by SIGTERM while it handles a message."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import escrowmq as mq

PAGE = Path(__file__).parents[2] / "docs" / "consuming.md"


@pytest.mark.invariant("I20")
def test_sigterm_loses_no_acknowledgement(tmp_path, serve):
    program = tmp_path / "mail.py"
    (text,) = re.findall(r'```python\n("""mail\.py.*?)```', PAGE.read_text(), re.DOTALL)
    slow = 'print("mail for", message.key, flush=True)\n    sys.stdin.readline()  # the test says when it is done'
    program.write_text(text.replace('print("mail for", message.key, flush=True)', slow))
    url = serve().url
    with mq.connect(url) as bus:
        producer = bus.producer("shop")
        for number in range(20):
            producer.send("orders", b"", key=f"o-{number}")
        command = [sys.executable, str(program), url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdin is not None
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
            handled = [run.stdout.readline()]  # it is being handled
            run.send_signal(signal.SIGTERM)
            run.stdin.write("\n")
            run.stdin.close()
            handled += run.stdout.read().splitlines(keepends=True)
        assert run.returncode == 0
        assert len(handled) == 1
        left = []
        with bus.consumer("mail", ["orders"]) as other:
            for message in other.messages(idle_timeout=60.0):
                left.append(f"mail for {message.key}\n")
                assert message.attempt == 1
                message.ack()
                if len(handled + left) == 20:
                    other.stop()
        assert sorted(handled + left) == sorted(f"mail for o-{number}\n" for number in range(20))
