"""The examples are programs, not packages: their folders are where Python looks for their modules."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

for name in ("shop", "transfer", "cart/compensated"):
    sys.path.insert(0, str(EXAMPLES / name))
