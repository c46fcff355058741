"""HTTP for those who cannot hold a connection: a face of the broker over a client bus, and check-back to configured addresses."""
