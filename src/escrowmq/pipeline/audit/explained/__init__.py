"""What is known about findings: their reasons, and the columns that differ."""
