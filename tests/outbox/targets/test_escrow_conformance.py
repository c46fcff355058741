"""The target for EscrowMQ keeps the contract of the relay's targets, on a real server."""

from collections.abc import Iterator

import pytest
from target_sites import EscrowSite

from escrowmq.testing.target_conformance import TargetConformance
from escrowmq_lab.servers import escrow
from forked import Forked


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EscrowSite]:
    with escrow.serving(tmp_path_factory.mktemp("escrow"), launcher=Forked) as server:
        yield EscrowSite(server)


class TestEscrow(TargetConformance):
    pass
