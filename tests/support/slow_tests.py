"""The split between ``make test`` (five minutes) and ``make verify`` (all other tests).

``make test`` has the unit tests, the ledger, the log, the behaviour of an embedded and a served broker, the programs of
the documentation, and one test of each integration. Tests in the lists below have the marker ``verify``.
"""

from __future__ import annotations

import re

FOLDERS = (
    "tests/broker/replicas/",
    "tests/celery/",
    "tests/chaos/",
    "tests/compensation/",
    "tests/console/",
    "tests/demo/",
    "tests/django/",
    "tests/examples/",
    "tests/faults/",
    "tests/gateway/",
    "tests/installed/",
    "tests/log/partitions/",
    "tests/outbox/modes/",
    "tests/outbox/relay/",
    "tests/pipeline/",
    "tests/planting/",
    "tests/rocketmq/",
    "tests/simulation/",
    "tests/spark/",
    "tests/system/",
    "tests/website/",
)
KEPT = (
    "tests/celery/test_celery_docs.py",
    "tests/console/test_console_pages.py",
    "tests/django/test_django_transactions.py",
    "tests/gateway/test_gateway_docs.py",
    "tests/gateway/test_gateway_endpoints.py",
    "tests/outbox/modes/test_modes_docs.py",
    "tests/outbox/modes/test_modes_driven.py",
    "tests/outbox/relay/test_relay_sending.py",
    "tests/rocketmq/test_rocketmq_service.py",
)
"""Files in these folders that ``make test`` runs all the same."""
FILE = re.compile(
    r"bench_|cli_(compensate|halves|log|serve)|crashes|damage|deaths|early_refusals|every_kind|fuzz|groups_model"
    r"|idle_connections|interleavings|kafka|kills|log_lookups|mariadb|mysql|operating_groups|planted|postgres|rabbitmq"
    r"|races|reading_folders|redis|restoring|salvage|state_machine|ways_in|work_command"
)
"""File names: fault injection, planted bugs, searches, servers of other products, and many processes."""
CASE = re.compile(r"\[.*(kafka|mariadb|mysql|postgres|rabbitmq|redis)", re.IGNORECASE)
"""Cases of tests that run on several servers."""
ONE_OF_EACH = (
    "tests/celery/test_celery_workers.py::test_a_task_of_thirty_minutes_runs_once_with_a_lease_of_one",
    "tests/celery/test_celery_workers.py::test_a_graceful_stop_returns_what_was_not_started[prefork]",
    "tests/celery/test_celery_kills.py::test_a_task_has_its_effect_if_and_only_if_its_order_was_committed[sqlite]",
    "tests/outbox/test_inbox.py::test_the_first_time_is_true_and_every_repeat_false",
    "tests/outbox/targets/test_kafka_conformance.py::TestKafka::test_keys_keep_their_order",
    "tests/outbox/targets/test_rabbitmq_conformance.py::TestRabbit::test_keys_keep_their_order",
    "tests/outbox/targets/test_redis_conformance.py::TestRedis::test_keys_keep_their_order",
    "tests/log/partitions/test_kafka_contract.py::TestWithItsMirror::test_numbers_count_up",
    "tests/spark/test_source_runs.py::test_a_topic_is_what_the_broker_has",
    "tests/console/test_console_browser.py::test_keys_lead_through_a_table",
    "tests/rocketmq/test_rocketmq_clients.py::test_transactions_are_committed_and_rolled_back[python]",
)
"""Single tests that ``make test`` runs all the same."""


def is_slow(nodeid: str) -> bool:
    """Return whether ``make verify`` runs the test, instead of ``make test``."""
    if nodeid.startswith(ONE_OF_EACH):
        return False
    file, _, case = nodeid.partition("::")
    if file.startswith(FOLDERS) and not file.startswith(KEPT):
        return True
    return bool(FILE.search(file.rpartition("/")[2]) or CASE.search(case))
