"""What the client's tests share."""

import time

import pytest


@pytest.fixture
def eventually():
    """Poll a condition: for states that have no signal of their own."""

    def wait(condition, timeout=20.0):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            time.sleep(0.002)

    return wait
