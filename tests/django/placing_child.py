"""Places orders and is killed in the middle: a process for ``test_django_kills``, called with a database's URL.

For every place to die it forks; the fork arms the failpoint, places five orders, each with a message and two tasks in
one atomic block, and dies by SIGKILL. Prints one JSON line a fork: place, and the orders that were committed before.
"""

import json
import os
import signal
import sys

import django_project

from escrowmq.platform import failpoints

PLACES = {
    "ordered:3": 2,
    "task.sent:5": 2,  # two tasks an order
    "task.recorded:5": 2,
    "task.sent:6": 2,
    "task.recorded:6": 2,
    "messaged:3": 2,
    "committed:3": 3,
}
"""Where to die, and how many blocks are committed then."""


def place(number: int) -> None:
    from django.db import transaction
    from till_app.models import Order
    from till_app.tasks import note, note_once

    from escrowmq.django import send_tx

    with transaction.atomic():
        Order.objects.create(id=number)
        failpoints.reach("ordered")
        note.enqueue(number)
        note_once.enqueue(number)
        send_tx("orders", b"placed", key=str(number))
        failpoints.reach("messaged")
    failpoints.reach("committed")


def main(url: str) -> None:
    first = 1
    for name, committed in PLACES.items():
        child = os.fork()
        if not child:
            django_project.configure(url)
            failpoints.arm(failpoints.parse(name))
            for number in range(first, first + 5):
                place(number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        done = list(range(first, first + committed))
        print(json.dumps({"place": name, "killed": killed, "committed": done}), flush=True)
        first += 5


if __name__ == "__main__":
    main(*sys.argv[1:])
