"""Where Spark's Python processes stand still (see escrowmq.platform.failpoints), chosen anew while a session runs.

For every environment Spark starts daemons of their own, and workers under them: for one stream that is about 7 s of
processor time. So the environment of a session stays as it is. Every place is armed, and the folder in which the
processes tell is a link to the folder of whoever waits now; there, the places that nobody waits for have told already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from escrowmq.platform.failpoints import TELL_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACES = (
    "spark.read-some",
    "spark.before-prepare",
    "spark.prepared-some",
    "spark.prepared",
    "spark.before-decision",
    "spark.after-decision",
    "spark.committed",
    "sweep.locked",
    "sweep.freeze-written",
    "sweep.released",
    "sweep.settled",
    "sweep.fence-written",
    "sweep.fenced",
    "sweep.orphan-written",
    "sweep.orphan-released",
    "job.failed",
)


class Stage:
    """The places of one session; its link and the folder of nobody are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.link = folder / "told"

    @classmethod
    def of(cls, spark: SparkSession) -> Stage:
        """That of a session for which :meth:`prepare` was called."""
        return cls(Path(spark.sparkContext.environment[TELL_VARIABLE]).parent)

    def prepare(self, spark: SparkSession) -> None:
        """Before the session starts its first Python process."""
        self.close()
        spark.sparkContext.environment |= self.environment

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment to stand still here."""
        return {VARIABLE: ",".join(PLACES), TELL_VARIABLE: str(self.link)}

    @contextlib.contextmanager
    def opened(self, told: Path, points: Iterable[str]) -> Iterator[None]:
        """While inside, the first that comes to each of ``points`` tells in ``told`` and stands still."""
        self.open(told, points)
        try:
            yield
        finally:
            self.close()

    def open(self, told: Path, points: Iterable[str]) -> None:
        """From now on; who stands still in another folder goes on standing there."""
        unknown = {*points} - {*PLACES}
        assert not unknown, f"not in PLACES: {unknown}"
        told.mkdir(parents=True, exist_ok=True)
        for place in {*PLACES} - {*points}:
            (told / f"{place}.told").touch()
        new = self.folder / "told.new"
        new.unlink(missing_ok=True)
        new.symlink_to(told.resolve())
        new.rename(self.link)  # at every moment there is one

    def close(self) -> None:
        """Nobody stands still any more who does not do so already."""
        self.open(self.folder / "nobody", ())
