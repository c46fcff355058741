"""A Django project for tests: one database, chosen at run time, the app ``till_app`` and the admin.

Django is set up once per process, so :func:`use_database` exchanges the database of a process that has begun.
"""

from __future__ import annotations

from typing import Any

import django
import pymysql
import sqlalchemy as sa
from django.conf import settings
from django.db import connections

pymysql.install_as_MySQLdb()

ENGINES = {"sqlite": "sqlite3", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}


def database_of(url: str) -> dict[str, Any]:
    """Django's settings of a database, from SQLAlchemy's URL."""
    parsed = sa.make_url(url)
    kind = ENGINES[parsed.get_backend_name()]
    options = {"timeout": 60, "transaction_mode": "IMMEDIATE"} if kind == "sqlite3" else {}
    if socket := parsed.query.get("unix_socket") or parsed.query.get("host"):
        parsed = parsed.set(host=str(socket))
    return {
        "ENGINE": f"django.db.backends.{kind}",
        "NAME": parsed.database,
        "USER": parsed.username or "",
        "PASSWORD": parsed.password or "",
        "HOST": parsed.host or "",
        "PORT": parsed.port or "",
        "OPTIONS": options,
    }


def configure(url: str = "sqlite:///unused.db", *, tasks: dict[str, Any] | None = None, **more: Any) -> None:
    """Set Django up, once per process."""
    if settings.configured:
        return
    backend = {"BACKEND": "escrowmq.django.tasks.EscrowBackend", "QUEUES": ["default", "slow"], "OPTIONS": tasks or {}}
    settings.configure(
        SECRET_KEY="for tests",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF="till_app.urls",
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "escrowmq.django",
            "till_app",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DATABASES={"default": database_of(url)},
        USE_TZ=True,
        STATIC_URL="/static/",
        TASKS={"default": backend},
        **more,
    )
    django.setup()


def use_database(url: str) -> None:
    """Exchange the database of this process."""
    connections.close_all()
    connections.settings["default"] = connections.configure_settings({"default": database_of(url)})["default"]
    del connections["default"]
