"""Test tools for your own tests: in-memory disks and logs, a simulated clock, conformance suites."""
