"""Look-up of rows by message id or key: sorted runs of hashes beside the segments, derived from
them.

From the bottom up: an entry of 8 bytes (``entries.py``), a file of sorted entries (``runs.py``) and how one is written,
from memory or from older ones (``writing.py``), what is not in a file yet (``tail.py``), and all of it together, kept
up by one thread (``finder.py``).
"""
