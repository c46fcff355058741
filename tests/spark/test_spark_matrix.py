"""The matrix over Spark: batch and streaming reads of each kind of source, and batch and streaming writes, without a
token, with a wrong one, and in each role, for things that exist and for things that do not.
"""

import itertools

import pytest
from guarded_broker import RightsFile, guarded
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource
from rights_table import CALLERS, lacking, sentence

import escrowmq as mq
from escrowmq.spark.source import EscrowSource
from escrowmq.wire import DEAD_LETTER_PREFIX, VIEWS

pytestmark = pytest.mark.spark
DEAD = f"{DEAD_LETTER_PREFIX}g"
SYSTEM = {view: ["view"] for view in ("%half", "%op", "%acks", "%group-acts")}
CASES = {
    "reader": {"t": ["read t"], DEAD: ["act g"], **SYSTEM},
    "streamReader": {"t": ["read t"], "%half": ["view"]},
    "writer": {"t": ["produce shop", "send t"]},
    "streamWriter": {"t": ["produce of-CALLER", "send t"]},
}
"""By the method of the data source and the source or topic: the rights, in the order of their refusal. A stream has a
producer group of its own."""


def unlisted():
    """Ways to read and write that the data source has and the table lacks, and views that nothing reads."""
    ways = {name for name in vars(EscrowSource) if not name.startswith("_") and hasattr(DataSource, name)}
    return (ways - {"name", "schema"}) ^ set(CASES) | (set(VIEWS) - set(CASES["reader"]))


def test_every_way_is_in_the_table():
    assert unlisted() == set()


def test_a_new_way_without_an_entry_is_found(monkeypatch):
    monkeypatch.setattr(EscrowSource, "simpleStreamReader", EscrowSource.streamReader, raising=False)
    monkeypatch.setitem(VIEWS, "%secrets", VIEWS["%half"])
    assert unlisted() == {"simpleStreamReader", "%secrets"}


class World:
    def __init__(self, spark, folder, url, rights):
        self.spark, self.folder, self.url = spark, folder, url
        self.files = {name: folder / f"{name}.token" for name in rights.tokens}
        for name, file in self.files.items():
            file.write_text(rights.tokens[name])
        with mq.connect(url, token=rights.tokens["admin"]) as bus:
            bus.producer("p").send_batch([mq.Message("t", b"x", key=str(number)) for number in range(3)])
            consumer = bus.consumer("g", "t", max_attempts=1)
            for message in itertools.islice(consumer.messages(idle_timeout=60), 3):
                message.nack()
            consumer.close()
        self.rows = spark.range(2).selectExpr("cast(id as string) as body")
        self.lines = folder / "lines"
        self.lines.mkdir()
        (self.lines / "some").write_text("one\ntwo\n")
        self.checkpoints = (folder / f"checkpoint-{number}" for number in range(1000))

    def run(self, way, source, caller, absent=False):
        """What Spark says; None if nothing failed."""
        options = {"url": self.url, "timeout": "60"}
        if caller is not None:
            options["tokenFile"] = str(self.files[caller])
        if absent:
            source = source.replace("%dead-letters.g", "%dead-letters.gone") if source != "t" else "gone"
        try:
            if way == "reader":
                self.spark.read.format("escrow").options(**options).load(topic=source).count()
            elif way == "writer":
                writer = self.rows.write.format("escrow").mode("append")
                writer.options(topic=source, group="gone" if absent else "shop", **options).save()
            else:
                self.stream(way, source, options, "gone" if absent else f"of-{caller}")
        except PySparkException as problem:
            return str(problem)
        return None

    def stream(self, way, source, options, group):
        if way == "streamReader":
            sink = (
                self.spark.readStream.format("escrow").options(**options).load(topic=source).writeStream.format("noop")
            )
        else:
            rows = self.spark.readStream.text(str(self.lines))
            sink = rows.selectExpr("value as body").writeStream.format("escrow")
            sink = sink.options(topic=source, group=group, **options)
        query = sink.option("checkpointLocation", str(next(self.checkpoints))).trigger(availableNow=True).start()
        query.awaitTermination()


@pytest.fixture(scope="module")
def world(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spark-matrix")
    rights = RightsFile(folder)
    for name, rules in CALLERS.items():
        rights.add(name, *rules)
    with guarded(folder, rights) as served:
        world = World(spark, folder, f"escrow://127.0.0.1:{served.port}", rights)
        world.files["unknown"] = folder / "unknown.token"
        world.files["unknown"].write_text("emq_wrong")
        yield world


@pytest.mark.invariant("I45")
@pytest.mark.parametrize(("way", "source"), [(way, source) for way, sources in CASES.items() for source in sources])
def test_each_caller_gets_the_answer_of_the_table(world, way, source):
    """Each run takes its time: every role tries one source of a kind, and one of them what is absent."""
    for caller in ("nobody", "reader") if source in SYSTEM else CALLERS:
        needs = [rule.replace("CALLER", caller) for rule in CASES[way][source]]
        need, found = lacking(CALLERS[caller], needs), world.run(way, source, caller)
        if need is None:
            assert found is None, caller
        else:
            assert sentence(caller, need) in found
    need = lacking([], CASES[way][source])
    absent = need if need.name is None else need._replace(name="gone")
    assert sentence("nobody", absent) in world.run(way, source, "nobody", absent=True)
    for caller in (None, "unknown"):
        assert "UNAUTHENTICATED" in world.run(way, source, caller)
