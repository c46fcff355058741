"""The client: producers, consumers and admin for one or several brokers, as a blocking and an asyncio API."""
