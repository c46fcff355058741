"""Stand-ins for tests, yours too: disks and logs in memory, a simulated clock, conformance suites, real servers."""
