"""The ledger: the fold of the log. Pure rules; no clock, disk, socket or randomness.

``Ledger.decide(command, now_us)`` reads the state and returns events and an answer; ``Ledger.apply(event, position,
time_us)`` changes the state and nothing else does. State lives in columns (NumPy arrays), never in an object per message.
"""
