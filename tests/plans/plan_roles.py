"""What the children of the zygote do: the command itself."""

from escrowmq.broker.serving import serve  # noqa: F401  (imported before the fork)
from escrowmq.cli import main, plan  # noqa: F401
from escrowmq.connecting import connect  # noqa: F401
from escrowmq.plans import Plans  # noqa: F401


def command(words: list[str]) -> None:
    main.app(words)
