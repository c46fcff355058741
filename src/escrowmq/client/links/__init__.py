"""Links to brokers, and the router that says which of several brokers a call goes to."""
