"""Producers and transactions: sessions, half messages, final decisions, check-back, writers of numbered batches."""
