"""The application of the tests: its workers write what they do into a file."""

import json
import os
import time
from pathlib import Path

from celery import Celery
from celery.exceptions import Reject

import escrowmq.celery

TOLD = Path(os.environ["TOLD"])
app = Celery("tasks_app", broker_url=os.environ["BROKER_URL"], set_as_current=True)
app.conf.update(json.loads(os.environ.get("CELERY_CONF", "{}")))
__all__ = ["app", "escrowmq"]


def tell(*words):
    with TOLD.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


@app.task
def note(name, until=None):
    """Begin, wait for a file, end."""
    tell("began", name)
    while until is not None and not Path(until).exists():
        time.sleep(0.01)
    tell("ended", name)


@app.task(acks_late=True)
def late(name, until=None):
    note(name, until)


@app.task(acks_late=True)
def refuse(name):
    tell("refused", name)
    raise Reject("spoilt", requeue=False)


@app.task(acks_late=True)
def requeue(name):
    tell("requeued", name)
    raise Reject("not now", requeue=True)


@app.task(acks_late=True, reject_on_worker_lost=True)
def die(name):
    tell("died", name)
    os._exit(1)


@app.task(bind=True, max_retries=2)
def retry(self, name):
    tell("tried", name, self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=0.2)
