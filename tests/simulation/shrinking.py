"""A run that fails because of a planted bug, made smaller; prints what became of it as JSON."""

from __future__ import annotations

import json

import pytest
from planted import BUGS, KNOWN

from escrowmq_lab.simulation.plan import Scale, draw
from escrowmq_lab.simulation.run import Run
from escrowmq_lab.simulation.shrink import shrink

BUG = "publish_what_is_rolled_back"


def main() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        BUGS[BUG][1](monkeypatch)
        plan = draw(KNOWN[BUG], Scale())
        result = Run(plan).result()
        smaller = plan.without(shrink(plan, result, most=40))
        still = Run(smaller, keep=True).result()
    print(
        json.dumps(
            {
                "what": result.violations[0].what,
                "still": [violation.what for violation in still.violations],
                "things": len(plan.names()),
                "needed": len(smaller.names()),
                "trace": still.trace,
            }
        )
    )


if __name__ == "__main__":
    main()
