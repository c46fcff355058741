"""Interfaces to the operating system: disk, clock and process. They are passed in, so that tests can pass simulated
ones.
"""
