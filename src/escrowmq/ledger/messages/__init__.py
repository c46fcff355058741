"""Messages on their way in: what is admitted, what is a repeat, which row gets which place and transaction."""
