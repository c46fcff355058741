"""The broker: engine, read paths, request checks, and the server process around them."""
