"""Links to brokers: one over Arrow Flight, and the router that says which of several brokers a call goes to."""
