"""Look-ups of log rows by message id or key: sorted runs of hashes beside the segments, derived from them.

From the bottom up: an entry of 8 bytes (``entries.py``), a file of sorted entries (``runs.py``) and its writer, from
memory or by merging (``writing.py``), entries not in a file yet (``tail.py``), and all of these combined and kept up to
date by one thread (``finder.py``).
"""
