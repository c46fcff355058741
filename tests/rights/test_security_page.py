"""docs/security.md: its blocks are run one after the other, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from escrowmq.rights import Access, parse
from escrowmq.rights.rules import ROLES
from escrowmq_lab.servers.process import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", PAGE.split("## The rights file")[0], re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Runs a block in the folder of the reader, whose variables stay; what it printed."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "escrowmq").write_text(f'#!/bin/sh\nexec {sys.executable} -m escrowmq "$@"\n')
    (bin / "escrowmq").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
    for name in ("ESCROWMQ_URL", "ESCROWMQ_TOKEN", "ESCROWMQ_TOKEN_FILE", "ESCROWMQ_RIGHTS"):
        environment.pop(name, None)

    def run(block):
        script = f"set -e\n{block}\nenv > .variables"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        environment.update(
            line.split("=", 1) for line in (tmp_path / ".variables").read_text().splitlines() if "=" in line
        )
        return done.stdout + done.stderr

    run.environment, run.folder = environment, tmp_path
    return run


@pytest.mark.invariant("I45")
def test_the_page_is_true(shell):
    port, printed, server = free_port(), [], None
    try:
        for language, block in BLOCKS:
            block = block.replace("0.0.0.0:7700", f"127.0.0.1:{port}").replace("127.0.0.1:7700", f"127.0.0.1:{port}")
            if "escrowmq serve" in block:
                words = [sys.executable, "-m", "escrowmq", *block.split()[1:], "--json"]
                server = subprocess.Popen(
                    words,
                    cwd=shell.folder,
                    env=shell.environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                assert "escrows://" in server.stdout.readline()
            elif language == "python":
                (shell.folder / "program.py").write_text(block)
                shell(f"{sys.executable} program.py")
            else:
                printed.append(shell(block))
    finally:
        if server is not None:
            server.terminate()
            server.communicate()
    text = "\n".join(printed)
    assert "send orders*, produce shop" in text  # whoami
    assert "service may not view this broker: it needs `view`" in text
    assert "exit code 7" in text
    assert re.search(r'allow = \["view"\]\s+1', text)
    assert "emq_" not in text, "a token was printed"


def test_the_tables_name_every_access_and_role():
    for access in Access:
        assert re.search(rf"^\| `{access}[ `]", PAGE, re.MULTILINE)
    for role in ROLES:
        assert f"`{role}`" in PAGE


def test_the_example_can_be_used():
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    rights = parse(block.replace("9f…", "9f" * 32).encode())
    assert rights.principals["shop"].limits.connections == 200


def test_beyond_loopback_both_are_needed(tmp_path):
    words = [sys.executable, "-m", "escrowmq", "serve", "--folder", str(tmp_path / "d"), "--listen", "0.0.0.0:0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert "no TLS and access rights" in done.stderr
    assert not (tmp_path / "d").exists()
