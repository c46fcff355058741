"""Tables of any database that SQLAlchemy knows, read on Spark in ranges of their keys, without JDBC."""
