"""PySpark jobs that compare broker and databases: audit, reconcile, sweeps and report."""
