"""Places orders with Celery's tasks and is killed in the middle: a process for ``test_django_celery``, called with a
database's URL.

Steps are before and after each statement, the publish of each task, and the commit. For each step it forks; the fork
places one order, and dies by SIGKILL at that step. Prints one JSON line a fork, until one ends.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from typing import Any

import celery.signals
import django_project
import sqlalchemy as sa
from celery import Celery


def task_of(app: Celery) -> Any:
    @app.task(name="ship", ignore_result=True)
    def ship(order: int) -> None:
        raise AssertionError("nobody works here")

    return ship


def place(number: int, die_at: int) -> None:
    """Place an order, whose task is sent with it, or die at a step."""
    from django.db import connection
    from till_app.models import Order

    import escrowmq.celery
    from escrowmq.django import engine_of
    from escrowmq.django.celery import atomic

    passed = itertools.count(1)

    def step(*_: Any, **__: Any) -> None:
        if next(passed) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def execute(run: Any, *given: Any) -> Any:
        step()
        result = run(*given)
        step()
        return result

    celery.signals.before_task_publish.connect(step, weak=False)
    celery.signals.after_task_publish.connect(step, weak=False)
    ship = task_of(Celery("shop", broker_url="escrow://127.0.0.1:1"))
    assert escrowmq.celery, "imported for its scheme"
    for event in ("before_cursor_execute", "after_cursor_execute"):  # of the outbox, which Django does not see
        sa.event.listen(engine_of(), event, step)
    with connection.execute_wrapper(execute):
        step()
        with atomic():
            Order.objects.create(id=number)
            ship.delay(number)
            step()
        step()


def main(url: str) -> None:
    for number in itertools.count(1):
        child = os.fork()
        if not child:
            django_project.configure(url)
            place(number, number)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"number": number, "status": status}), flush=True)
        if status != -signal.SIGKILL:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
