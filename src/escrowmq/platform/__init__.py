"""Interfaces to the operating system: disk, clock and process. Everything above is given these; tests give their
twins.
"""
