"""The client: producers, consumers and admin over links to one or several brokers, sync and async over one core."""
