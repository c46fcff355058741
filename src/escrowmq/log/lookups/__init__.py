"""Look-ups of log rows by message id or key: sorted runs of hashes beside the segments, derived from them.

From the bottom up: an entry of 8 bytes (``entries.py``), a file of sorted entries (``runs.py``) and its writer
(``writing.py``), what is searched, entries in memory included (``parts.py``), and the thread that keeps it up to date
(``finder.py``).
"""
