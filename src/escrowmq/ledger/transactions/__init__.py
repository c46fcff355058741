"""Producers and their transactions: sessions, half messages, the one decision of each, check-back, writers of batches."""
