"""Readers: topics without a group, from positions that the caller keeps."""
