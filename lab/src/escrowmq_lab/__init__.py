"""The laboratory of EscrowMQ: simulation, chaos with real processes, benchmarks, and the servers that tests start."""
