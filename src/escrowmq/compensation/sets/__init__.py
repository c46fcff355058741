"""Where the two sets live: one contract (``seam.py``), kept by Redis and by SQL databases."""
