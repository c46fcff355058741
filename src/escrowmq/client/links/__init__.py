"""Links to brokers: over Arrow Flight, over the lean carrier in front of it, and the router that says which of several brokers a call goes to."""
