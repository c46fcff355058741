"""The client: producers, consumers and admin over links to one or several brokers, blocking and asyncio faces over one core."""
