"""The ledger: the broker's state, the fold of all events of the log. Pure: no clock, disk, socket or randomness.

``Ledger.decide(command, now_us)`` returns events and an answer; only ``Ledger.apply(kind, batch, position, time_us)``
changes the state. State is stored in columns (NumPy arrays), never in an object per message.
"""
