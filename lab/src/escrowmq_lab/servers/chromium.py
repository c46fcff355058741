"""The Chromium browser of this machine, for tests of pages. Debian package: ``chromium``."""

from __future__ import annotations

import os
import shutil

from escrowmq_lab.servers.seam import Absent


def program() -> str:
    """Return the path of the browser. Raises :class:`Absent`."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise Absent("Chromium is not installed; on Debian: apt-get install chromium")
    return found


def flags() -> list[str]:
    """Return flags for a start without a screen: the sandbox does not work for root, who runs tests in containers."""
    return ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
