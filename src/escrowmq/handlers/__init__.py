"""Handlers: decorated functions that the messages of consumer groups are passed to.

    from escrowmq.handlers import App

    app = App()

    @app.handler("orders", group="cart")
    def add_to_cart(order: Order) -> None: ...

``escrowmq work shop:app`` runs them, as do :meth:`App.running` and :meth:`App.lifespan` in a process of yours.
"""

from escrowmq.handlers.app import App
from escrowmq.handlers.outcomes import Discard, Handled, Retry
from escrowmq.handlers.running import Running

__all__ = ["App", "Discard", "Handled", "Retry", "Running"]
