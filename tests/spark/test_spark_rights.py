"""Reading and writing a broker with rights: by a token file, with the right error without, and without the secret in
anything that Spark keeps.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

import escrowmq as mq
from escrowmq.errors import Misuse
from escrowmq.rights.tokens import digest, new_token
from escrowmq.spark.options import read_options, write_options

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(tmp_path):
    """A broker whose Spark principal may read and write; its URL, and the files of tokens."""
    tokens = {name: new_token().text for name in ("spark", "stranger")}
    files = {}
    for name, token in tokens.items():
        files[name] = tmp_path / f"{name}.token"
        files[name].write_text(token + "\n")
    (tmp_path / "rights.toml").write_text(
        f'[principals.spark]\ntokens = [{{ sha256 = "{digest(tokens["spark"])}" }}]\n'
        'allow = ["read *", "view", "send t*", "produce *"]\n'
        f'[principals.stranger]\ntokens = [{{ sha256 = "{digest(tokens["stranger"])}" }}]\nallow = ["read other"]\n'
    )
    words = ["serve", "--folder", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "escrowmq", *words, "--rights", str(tmp_path / "rights.toml")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield json.loads(process.stdout.readline())["url"], files, tokens
    finally:
        process.terminate()
        process.communicate()


def test_a_token_in_an_option_is_refused():
    for read in (read_options, write_options):
        with pytest.raises(Misuse, match="tokenFile"):
            read({"url": "escrow://127.0.0.1:1", "topic": "t", "token": "emq_secret"})


def test_batches_and_streams_with_a_token_file(spark, tmp_path, broker):
    url, files, tokens = broker
    file = str(files["spark"])
    with mq.connect(url, token_file=file) as bus:
        bus.producer("p").send_batch([mq.Message("t", b"x", key=str(number)) for number in range(100)])
    frame = spark.read.format("escrow").load(url, topic="t", tokenFile=file)
    assert frame.count() == 100
    frame.select("key", "body").write.format("escrow").mode("append").options(topic="t2", tokenFile=file).save(url)
    assert spark.read.format("escrow").load(url, topic="t2", tokenFile=file).count() == 100
    stream = spark.readStream.format("escrow").load(url, topic="t2", tokenFile=file).select("key", "body")
    query = (
        stream.writeStream.format("escrow")
        .options(topic="t3", tokenFile=file, checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(url)
    )
    query.awaitTermination()
    assert spark.read.format("escrow").load(url, topic="t3", tokenFile=file).count() == 100
    plan = frame._jdf.queryExecution().toString()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    for secret in tokens.values():
        assert secret not in plan
        assert secret.encode() not in stored


def test_without_the_right_the_error_names_it(spark, broker):
    url, files, _ = broker
    with pytest.raises(PySparkException, match="stranger may not read topic t: it needs `read t`"):
        spark.read.format("escrow").load(url, topic="t", tokenFile=str(files["stranger"])).count()
    with pytest.raises(PySparkException, match="UNAUTHENTICATED"):
        spark.read.format("escrow").load(url, topic="t").count()
    with pytest.raises(PySparkException, match="cannot be read"):
        spark.read.format("escrow").load(url, topic="t", tokenFile=str(Path(os.devnull).parent / "none")).count()
