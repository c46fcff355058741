"""Real servers for tests, benchmarks and examples: on free loopback ports, in separate folders, stopped afterwards."""
