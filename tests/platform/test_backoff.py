"""Back-off: doubling with jitter, one pause for all who meet the same outage, forgotten by a success."""

from __future__ import annotations

import time

import pytest

from escrowmq.platform.backoff import Backoff


def test_backoff_doubles_with_jitter_up_to_its_limit_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    backoff = Backoff(1.0, 8.0)
    assert backoff.left() == 0
    assert not backoff.worked()
    seen = []
    for _ in range(6):
        seen.append(backoff.failed())
        assert 0 < backoff.left() <= seen[-1]
        assert backoff.failed() <= seen[-1]  # another worker's try of the same outage does not double it
        backoff._until = 0.0
    for pause, middle in zip(seen, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.5 * middle <= pause <= 1.5 * middle
    assert backoff.worked()
    assert 0.5 <= backoff.failed() <= 1.5
