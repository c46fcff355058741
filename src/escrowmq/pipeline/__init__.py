"""PySpark jobs over both sides of every transaction. The only place that knows of Spark."""
