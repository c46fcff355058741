"""Producers: sessions, messages and decisions as columns, transactions, check-back, numbered batches."""
