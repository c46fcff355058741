"""PySpark jobs over both sides of every transaction: audit, reconcile, sweeps and report."""
