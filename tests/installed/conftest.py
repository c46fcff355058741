"""The distributions that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import environments
import pytest


@pytest.fixture(scope="session")
def distributions() -> Iterator[tuple[Path, Path]]:
    with environments.distributions() as made:
        yield made


@pytest.fixture
def sdist(distributions: tuple[Path, Path]) -> Path:
    return distributions[0]


@pytest.fixture
def wheel(distributions: tuple[Path, Path]) -> Path:
    return distributions[1]
