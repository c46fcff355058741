"""The table of tasks."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Tasks and their results."""

    dependencies = (("escrowmq", "0001_version_4"),)
    operations = (
        migrations.CreateModel(
            name="TaskRecord",
            fields=[
                ("id", models.CharField(max_length=32, primary_key=True, serialize=False)),
                ("backend", models.CharField(max_length=64)),
                ("task_path", models.CharField(max_length=500)),
                ("queue_name", models.CharField(max_length=127)),
                ("run_after", models.DateTimeField(null=True)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("READY", "Ready"),
                            ("RUNNING", "Running"),
                            ("FAILED", "Failed"),
                            ("SUCCESSFUL", "Successful"),
                        ],
                        default="READY",
                        max_length=10,
                    ),
                ),
                ("enqueued_at", models.DateTimeField()),
                ("started_at", models.DateTimeField(null=True)),
                ("last_attempted_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("arguments", models.TextField()),
                ("return_value", models.TextField(null=True)),
                ("errors", models.TextField(default="[]")),
                ("worker_ids", models.TextField(default="[]")),
            ],
            options={
                "verbose_name": "task",
                "db_table": "escrow_task",
                "default_permissions": ("view",),
                "indexes": [models.Index(fields=["status", "finished_at"], name="escrow_task_by_status")],
            },
        ),
    )
