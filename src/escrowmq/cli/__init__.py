"""The command ``escrowmq``, one subcommand per file, built only on the public client API."""

import sys

from escrowmq.platform.arena import limit_arena

if sys.argv[1:2] == ["serve"]:  # here, because Arrow reads it when it is loaded, and every command loads it
    limit_arena()
