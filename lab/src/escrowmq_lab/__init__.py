"""The laboratory of EscrowMQ: simulation, chaos with real processes, benchmarks, and servers for tests."""
