"""The environment in which tests run: a home of their own, and none of the user's settings.

A test that reads the user's plans fails for this user alone, and one that writes them harms the user. So ``HOME`` and
the folders of the XDG Base Directory Specification are below a temporary folder: one for the run, which servers and
sessions have, and one for each test. What is downloaded once and kept, such as Kafka, is below ``.cache`` of the
checkout.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"
_BELOW_HOME = {
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}


def variables(home: Path) -> dict[str, str]:
    """The variables that name ``home`` and what is in it."""
    below = {name: str(home / path) for name, path in _BELOW_HOME.items()}
    return {"HOME": str(home), "XDG_CACHE_HOME": str(CACHE), **below}


def isolate(environment: MutableMapping[str, str], home: Path) -> None:
    """Give an environment the empty folder ``home``, and take the user's settings of EscrowMQ out of it."""
    for name in [name for name in environment if name.startswith("ESCROWMQ_")]:
        del environment[name]
    environment.update(variables(home))
