"""The database side: local message table, receive log, barrier, relay. SQLAlchemy 2 sessions and connections.

``_tx`` always means "inside your transaction": such a call writes through your session and commits nothing itself.
"""
