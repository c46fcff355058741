"""Real servers for tests, benchmarks and examples: started on free loopback ports in a folder of their own, stopped
afterwards.
"""
