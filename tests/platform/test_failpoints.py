"""Failpoints: a process dies, or stands still, exactly where and when it was told to."""

import os
import signal
import subprocess
import sys

import pytest

from escrowmq.errors import Misuse
from escrowmq.platform import failpoints

PROGRAM = """
from escrowmq.platform.failpoints import reach
for n in range(5):
    print(n, flush=True)
    reach("test.step")
"""


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.arm()


def run(point: str, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, failpoints.VARIABLE: point, **more}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("point", "lines"), [("test.step", 1), ("test.step:3", 3), ("other,test.step:2", 2)])
def test_a_process_dies_where_it_was_told_to(point, lines):
    with run(point) as child:
        told, _ = child.communicate()
    assert (told.split(), child.returncode) == ([str(n) for n in range(lines)], -signal.SIGKILL)


def test_another_name_does_nothing():
    with run("test.other") as child:
        assert len(child.communicate()[0].split()) == 5
    assert child.returncode == 0


def test_it_stands_still_until_the_file_is_gone_and_tells_once(tmp_path):
    with run("test.step:2", ESCROWMQ_FAILPOINT_TELL=str(tmp_path)) as child:
        file = tmp_path / "test.step"
        while not file.exists():
            assert child.poll() is None
        assert int(file.read_text()) == child.pid
        file.unlink()
        assert len(child.communicate()[0].split()) == 5
    assert child.returncode == 0
    with run("test.step", ESCROWMQ_FAILPOINT_TELL=str(tmp_path)) as again:  # another process comes to the same place
        assert len(again.communicate()[0].split()) == 5


def test_where_the_folder_is_a_link_that_is_led_elsewhere_the_same_process_tells_again(tmp_path):
    link = tmp_path / "link"
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    link.symlink_to(tmp_path / "one")
    with run("test.step", ESCROWMQ_FAILPOINT_TELL=str(link)) as child:
        for folder in ("one", "other"):
            file = tmp_path / folder / "test.step"
            while not file.exists():
                assert child.poll() is None
            assert int(file.read_text()) == child.pid
            if folder == "one":
                (tmp_path / "new").symlink_to(tmp_path / "other")
                (tmp_path / "new").rename(link)
            file.unlink()
        assert len(child.communicate()[0].split()) == 5
    assert child.returncode == 0


def test_in_this_process_it_can_act_otherwise():
    reached = []
    failpoints.arm(
        failpoints.parse("a:2", lambda: reached.append("a")), failpoints.parse("b", lambda: reached.append("b"))
    )
    for name in ("a", "b", "a", "a", "c"):
        failpoints.reach(name)
    assert reached == ["b", "a"]


@pytest.mark.parametrize("text", ["", ":", "a:", "a:0", "a:x", "../a"])
def test_a_wrong_name_is_refused(text):
    with pytest.raises(Misuse):
        failpoints.parse(text)
