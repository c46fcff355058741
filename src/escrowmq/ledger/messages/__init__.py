"""Messages on their way in: what is admitted, what is a repeat, which queue and transaction each row gets."""
