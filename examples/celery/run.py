"""run.py FOLDER: run a broker, a relay and a Celery worker, place orders, kill who places them, and compare."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1]).resolve()
folder.mkdir(parents=True, exist_ok=True)
os.environ["DATABASE_URL"] = database = f"sqlite:///{folder / 'shop.db'}"
escrowmq, celery = [sys.executable, "-m", "escrowmq"], [sys.executable, "-m", "celery"]
serve = [*escrowmq, "serve", "-d", str(folder / "data"), "-l", "127.0.0.1:0", "--json"]
broker = subprocess.Popen(serve, stdout=subprocess.PIPE)
os.environ["BROKER_URL"] = url = json.loads(broker.stdout.readline())["url"]

import shop_tasks  # noqa: E402  # it reads the two variables

shop_tasks.make_tables()
here = Path(__file__).parent
with (folder / "worker.log").open("wb") as log:
    worker = subprocess.Popen([*celery, "-A", "shop_tasks", "worker"], cwd=here, stdout=log, stderr=log)
    relay = subprocess.Popen([*escrowmq, "outbox", "relay", "-d", database, "--to", url], stdout=log, stderr=log)

for order, die in (("o-1", ""), ("o-2", "before"), ("o-3", "after")):
    program = f"import shop_tasks; shop_tasks.place({order!r}, {die!r})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=here, check=False).returncode
    print(f"{order}: {f'killed {die} the commit' if ended else 'placed'}")


def ids(table: str) -> list[str]:
    with shop_tasks.engine.connect() as connection:
        return sorted(row[0] for row in connection.exec_driver_sql(f"SELECT * FROM {table}"))


while ids("shipments") != ids("orders"):
    time.sleep(0.1)
print("orders:   ", *ids("orders"))
print("shipments:", *ids("shipments"))
for process in (relay, worker, broker):
    process.terminate()
    process.wait()
