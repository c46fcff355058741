"""I37 through SIGKILL: a process dies between any two statements of its transaction."""

import json
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from outbox_world import agree, to_await

import forked

HERE = Path(__file__).parent


@pytest.mark.invariant("I37")
def test_i37_a_process_killed_between_any_two_statements(shop: sa.Engine) -> None:
    """By Core, by the ORM (which flushes the order after the message) and to await, with the message in a savepoint."""
    url = shop.url.render_as_string(hide_password=False)
    ran = forked.run([sys.executable, HERE / "placing_child.py", url, to_await(url)], cwd=HERE)
    assert ran.returncode == 0, ran.stderr
    forks = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [fork["killed"] for fork in forks] == [True] * 9, (forks, ran.stderr)
    assert agree(shop) == {number for fork in forks for number in fork["committed"]}
