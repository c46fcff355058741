"""Orders, and the mails that were sent for them."""

from django.db import models


class Order(models.Model):
    id = models.CharField(primary_key=True, max_length=36)


class Mail(models.Model):
    order = models.CharField(max_length=36)
