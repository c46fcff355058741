"""Rules for one message: names, limits, ids and the row in which it is sent. Each rule once, per row and column.

The modules that the ledger uses (``names``, ``limits``, ``ids``) are pure: no clock, no randomness.
"""
