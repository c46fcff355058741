"""The options of a demonstration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import Code, Misuse


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Raises Misuse(BAD_ARGUMENT) for numbers that make no sense.

    ``folder`` None: a new folder ``demo-run`` (``demo-run-2``, ...) in the working directory. ``orders`` None: ``count``
    generated ones, the same for the same ``seed``. Kills are numbers of ``kill -9``.
    """

    folder: Path | None = None
    orders: Path | None = None
    count: int = 2000
    seed: int = 1
    limit: int | None = None  # use only the first so many orders
    shop_kills: int = 4  # between the database commit and the COMMIT
    broker_kills: int = 2
    service_kills: int = 1  # of each consumer, between its database commit and its ack
    threads: int = 24  # tills of the shop: orders placed at the same time
    audit: bool = True

    def __post_init__(self) -> None:
        for name in ("shop_kills", "broker_kills", "service_kills"):
            if getattr(self, name) < 0:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} is a number of kills, 0 or more")
        for name in ("count", "threads", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} must be at least 1")

    def run_folder(self) -> Path:
        """The folder to use, made if need be. Raises Misuse(BAD_ARGUMENT) if it is there and not empty."""
        if self.folder is None:
            names = ["demo-run", *(f"demo-run-{n}" for n in range(2, 10_000))]
            folder = next(path for name in names if not (path := Path(name)).exists())
        else:
            folder = self.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Misuse(Code.BAD_ARGUMENT, f"{folder} is there and is not an empty folder", "name a new one")
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()
