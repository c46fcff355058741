"""docs/celery.md: its program and its commands, as they are typed, on another port."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from celery_world import until

from escrowmq_lab.servers.process import accepts, free_port

PAGE = (Path(__file__).parents[2] / "docs" / "celery.md").read_text()


def test_the_program_of_the_page(tmp_path: Path) -> None:
    port = free_port()
    [program], [commands] = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "sh"))
    assert program.startswith("# shop.py\n")
    (tmp_path / "shop.py").write_text(program.replace("7700", str(port)))
    more = {"escrowmq serve": ["-l", f"127.0.0.1:{port}"], "escrowmq outbox": ["--to", f"escrow://127.0.0.1:{port}"]}
    *services, once = commands.splitlines()
    assert once == "python shop.py"
    running, log = [], (tmp_path / "log").open("wb")
    try:
        for number, line in enumerate(services):
            added = next((words for start, words in more.items() if line.startswith(start)), [])
            if "relay" in line:  # as somebody does who follows the page: it needs the tables that the others make
                until(lambda: b"[queues]" in (tmp_path / "log").read_bytes(), "a worker that has the program")
            command = [sys.executable, "-m", *shlex.split(line), *added]
            running.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True))
            if number == 0:
                until(lambda: accepts(port), "a broker")
        subprocess.run([sys.executable, once.split()[1]], cwd=tmp_path, check=True)
        until(lambda: b"shipping order 1" in (tmp_path / "log").read_bytes(), "a shipped order")
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
        log.close()
