"""An app for ``escrowmq work``: a handler that waits for a file, and one that fails."""

import os
import time
from pathlib import Path

from escrowmq.handlers import App

app = App()
folder = Path(os.environ["SLOWLY"])


@app.handler("slow", group="slow", lease=600.0)
def wait(name: str) -> None:
    (folder / f"{name}.begun").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / f"{name}.done").touch()


@app.handler("poison", group="poison", max_attempts=2, retry_backoff=0.01, retry_backoff_max=0.01)
def swallow(body: str) -> None:
    if not (folder / "antidote").exists():
        raise ValueError(f"{body} is poison")
    (folder / "swallowed").write_text(body)
