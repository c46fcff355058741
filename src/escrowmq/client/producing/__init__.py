"""Producers: sessions, message and decision batches, transactions, check-back, commits of numbered batches."""
