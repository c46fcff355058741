"""Orders, and the effects of tasks and messages about them."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """A business row; ``number`` is unique so that an insert can be made to fail."""

    id = models.IntegerField(primary_key=True)
    number = models.IntegerField(null=True, unique=True)

    class Meta:
        app_label = "till_app"


class Effect(models.Model):
    """What a handler or a task did for an order."""

    order = models.IntegerField()

    class Meta:
        app_label = "till_app"


class Payment(models.Model):
    """What a handler did for a message about an order: a repeat would add a row."""

    order = models.IntegerField()

    class Meta:
        app_label = "till_app"
