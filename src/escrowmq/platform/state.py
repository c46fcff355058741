"""The folder for what commands of this user remember."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return ``escrowmq`` in the user's XDG state directory."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "escrowmq"
