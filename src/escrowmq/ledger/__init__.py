"""The ledger: the broker's state, computed by applying every event of the log in order. Pure rules; no clock, disk,
socket or randomness.

``Ledger.decide(command, now_us)`` reads the state and returns events and an answer; ``Ledger.apply(event, position,
time_us)`` changes the state and nothing else does. State lives in columns (NumPy arrays), never in an object per
message.
"""
