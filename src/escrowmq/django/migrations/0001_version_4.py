"""Version 4 of the outbox's tables, as :mod:`escrowmq.outbox.migrations` makes them."""

from django.db import migrations, models

from escrowmq.django.migrations import keep, upgrade


class Migration(migrations.Migration):
    """All tables of the outbox; two of them are models."""

    initial = True
    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(upgrade, keep)],
            state_operations=[
                migrations.CreateModel(
                    name="OutboxMessage",
                    fields=[
                        ("seq", models.BigAutoField(primary_key=True, serialize=False)),
                        ("message_id", models.BinaryField(db_column="id")),
                        ("lane", models.SmallIntegerField()),
                        (
                            "state",
                            models.SmallIntegerField(
                                choices=[
                                    (0, "pending"),
                                    (1, "sent"),
                                    (2, "done"),
                                    (3, "waiting"),
                                    (4, "discarded"),
                                    (5, "retrying"),
                                    (6, "held"),
                                ]
                            ),
                        ),
                        ("topic", models.CharField(max_length=127)),
                        ("key", models.TextField(null=True)),
                        ("tag", models.TextField(null=True)),
                        ("properties", models.TextField(null=True)),
                        ("body", models.BinaryField()),
                        ("delay_us", models.BigIntegerField()),
                        ("attempts", models.IntegerField()),
                        ("due_us", models.BigIntegerField()),
                        ("created_us", models.BigIntegerField()),
                        ("sent_us", models.BigIntegerField(null=True)),
                        ("done_us", models.BigIntegerField(null=True)),
                        ("error", models.TextField(null=True)),
                    ],
                    options={
                        "verbose_name": "outbox message",
                        "db_table": "trans_message",
                        "permissions": (("operate_outboxmessage", "Can retry, discard and settle outbox messages"),),
                        "default_permissions": ("view",),
                    },
                ),
                migrations.CreateModel(
                    name="OperatorAction",
                    fields=[
                        ("number", models.BigIntegerField(primary_key=True, serialize=False)),
                        ("record", models.TextField()),
                    ],
                    options={"db_table": "trans_act", "managed": False, "default_permissions": ("view",)},
                ),
            ],
        ),
    )
