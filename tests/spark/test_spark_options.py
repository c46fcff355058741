"""Options of format "escrow", without a JVM."""

import pytest

from escrowmq.errors import Misuse
from escrowmq.spark.options import read_options, write_options
from escrowmq.spark.preparing import check_columns

URL = "escrow://127.0.0.1:7700"


def refused(act, *args, **options):
    with pytest.raises(Misuse) as problem:
        act(*args, **options)
    return str(problem.value)


def test_what_is_given_is_read_whatever_the_case_of_its_name():
    options = read_options(
        {"URL": URL, "Topic": "a, b", "START": "2026-01-31T12:00:00+00:00", "maxRowsPerPartition": "10", "tags": "x||y"}
    )
    assert (options.url, options.sources, options.tags) == (URL, ("a", "b"), ("x", "y"))
    assert (options.start, options.end, options.partition_rows) == (1_769_860_800_000_000, "latest", 10)


@pytest.mark.parametrize("path", [URL, "escrow:/127.0.0.1:7700", "escrow:127.0.0.1:7700"])
def test_the_path_of_load_is_the_url_even_after_spark_made_a_path_of_it(path):
    assert read_options({"path": path, "topic": "t"}).url == URL


def test_offsets_are_json():
    assert read_options({"url": URL, "topic": "t", "start": '{"t/0000002a/0": 7}'}).start == {"t/0000002a/0": 7}
    for text in ('{"t/0000002a/0": -1}', '{"t/0000002a/0": true}', "{", "{}", '{"a": "b"}'):
        assert "start" in refused(read_options, {"url": URL, "topic": "t", "start": text})


def filters(**options):
    return read_options({"url": URL, "topic": "t"} | options).filters


def test_filters_become_those_of_the_request_to_the_broker():
    assert filters() == {}
    assert filters(key="k", tags="a||b") == {"key": "k", "tags": ["a", "b"]}
    assert filters(key="") == {"key": ""}
    assert filters(storedFrom="2026-01-31T12:00:00.000001+00:00", storedUntil="2026-01-31T14:00:00+01:00") == {
        "stored_from_us": 1_769_860_800_000_001,
        "stored_until_us": 1_769_864_400_000_000,
    }
    assert filters(topic="%acks", group="g") == {"group": "g"}
    assert read_options({"url": URL, "topic": "t", "queues": "3, 0"}).queues == (0, 3)


def test_start_and_end_by_time_are_filters_of_a_view_and_offsets_of_a_topic():
    noon, later, last = "2026-01-31T12:00:00", "2026-01-31T12:00:01", "2026-01-31T12:00:02"
    at = 1_769_860_800_000_000
    both = {"stored_from_us": at, "stored_until_us": at + 2_000_000}
    assert filters(start=noon, end=last) == {}
    assert filters(topic="%half", start=noon, end=last) == both
    narrower = {"stored_from_us": at + 1_000_000, "stored_until_us": at + 1_000_000}
    assert filters(topic="%half", start=noon, end=last, storedFrom=later, storedUntil=later) == narrower
    assert filters(topic="%half", start=later, storedFrom=noon) == {"stored_from_us": at + 1_000_000}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": URL, "topic": "t", "tags": "||"}, "tags with || between"),
        ({"url": URL, "topic": "t", "queues": "0;1"}, "numbers of queues with commas between"),
        ({"url": URL, "topic": "t", "queues": "-1"}, "numbers of queues with commas between"),
        ({"url": URL, "topic": "t", "assign": "{}"}, "did you mean 'queues'?"),
        ({"url": URL, "topic": "t", "storedFrom": "earliest"}, "storedFrom = 'earliest' (a time such as"),
        ({"url": URL, "topic": "t", "group": "g"}, "t has no option 'group' (%acks and %group-acts have)"),
        (
            {"url": URL, "topic": "%half", "queues": "0"},
            "%half has no option 'queues' (filter its rows with where(...))",
        ),
        ({"url": URL, "topic": "%op", "key": "k"}, "%op has no option 'key'"),
        ({"url": URL, "topic": "%acks", "tags": "a"}, "%acks has no option 'tags'"),
        ({"topic": "t"}, "'url' is missing"),
        ({"url": URL}, "'topic' is missing"),
        ({"url": URL, "topik": "t"}, "did you mean 'topic'?"),
        ({"url": URL, "topic": "t", "startingOffsets": "earliest"}, "did you mean 'start'?"),
        ({"url": URL, "topic": "t", "maxOffsetsPerTrigger": "1"}, "did you mean 'maxRowsPerTrigger'?"),
        ({"url": URL, "topic": "t", "subscribe": "t"}, "did you mean 'topic'?"),
        ({"url": URL, "topic": "t", "start": "yesterday"}, "start = 'yesterday'"),
        ({"url": URL, "topic": "t", "end": "earliest"}, "end = 'earliest'"),
        ({"url": URL, "topic": "t", "maxRowsPerPartition": "0"}, "maxRowsPerPartition = '0'"),
        ({"url": URL, "topic": "t", "timeout": "-1"}, "timeout = '-1'"),
        ({"url": URL, "topic": "%half,%op"}, "a system view is read alone"),
        ({"url": URL, "topic": "t,t"}, "names a topic twice"),
        ({"url": URL, "topic": "t", "maxRowsPerTrigger": "5"}, "is of streams"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_right(options, told):
    assert told in refused(read_options, options)


def test_a_stream_has_no_end():
    assert "availableNow" in refused(read_options, {"url": URL, "topic": "t", "end": "latest"}, streaming=True)


def test_writing_needs_a_broker_and_knows_its_options():
    assert write_options({"path": URL, "topic": "t", "write_id": "w", "checkpointLocation": "/c"}).checkpoint == "/c"
    assert "escrowmq serve" in refused(write_options, {"url": "file:./data", "topic": "t"})
    assert "did you mean 'topic'?" in refused(write_options, {"url": URL, "topics": "t"})
    assert write_options({"path": URL, "adopt": "True"}).adopt
    assert "adopt = 'yes'" in refused(write_options, {"url": URL, "adopt": "yes"})


@pytest.mark.parametrize(
    ("types", "topic", "told"),
    [
        ({"key": "string"}, "t", "no column 'body'"),
        ({"body": "bigint"}, "t", "column 'body' is bigint, not binary or string"),
        ({"body": "binary", "keys": "string"}, "t", "did you mean 'key'?"),
        ({"body": "binary"}, None, "no topic"),
        ({"body": "binary", "topic": "string"}, "t", "which?"),
        ({"body": "binary", "properties": "map<string,int>"}, "t", "map<string,string>"),
    ],
)
def test_a_frame_that_cannot_be_written_is_refused_by_name(types, topic, told):
    assert told in refused(check_columns, types, topic)


def test_a_frame_that_can_be_written_is_not():
    check_columns({"body": "string", "key": "string", "topic": "string", "properties": "map<string,string>"}, None)
    check_columns({"body": "binary"}, "t")


def test_what_a_batch_of_a_stream_has():
    options = {"url": URL, "topicPattern": "ord.*", "minRowsPerTrigger": "5", "maxTriggerDelay": "2min"}
    made = read_options(options | {"maxBytesPerTrigger": "64MiB", "onPurged": "SKIP"}, streaming=True)
    assert (made.sources, made.pattern, made.first_source) == ((), "ord.*", "")
    assert (made.waiting_rows, made.trigger_delay, made.trigger_bytes, made.skip_purged) == (5, 120.0, 64 << 20, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topicPattern": "a.*", "topic": "a"}, "'topic' and 'topicPattern'"),
        ({"topicPattern": "a("}, "regular expression"),
        ({"topicPattern": "a.*", "group": "g"}, "'group'"),
        ({"topic": "a", "minRowsPerTrigger": "9", "maxRowsPerTrigger": "8"}, "more than maxRowsPerTrigger"),
        ({"topic": "a", "maxBytesPerTrigger": "many"}, "bytes"),
        ({"topic": "a", "maxTriggerDelay": "0s"}, "more than 0"),
        ({"topic": "a", "onPurged": "ignore"}, "fail or skip"),
        ({"topic": "%op", "maxBytesPerTrigger": "1MiB"}, "maxRowsPerTrigger"),
        ({"topic": "a", "subscribePattern": "a.*"}, "'topicPattern'"),
        ({"topic": "a", "failOnDataLoss": "false"}, "'onPurged'"),
    ],
)
def test_a_wrong_option_of_a_stream(options, words):
    assert words in refused(read_options, {"url": URL} | options, streaming=True)


@pytest.mark.parametrize("name", ["minRowsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"])
def test_a_batch_has_no_limit_of_micro_batches(name):
    assert name in refused(read_options, {"url": URL, "topic": "a", name: "5"})
