"""What a message may be: names, limits, ids, and the row in which it travels. Each rule once, per row and per column.

The modules that the ledger uses (``names``, ``limits``, ``ids``) are pure: no clock, no randomness.
"""
