"""Admission of messages: validation, de-duplication, and the queue and transaction of each row."""
