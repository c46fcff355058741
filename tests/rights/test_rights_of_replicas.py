"""Access rights of the brokers of a shard: each checks them itself, and clients keep theirs when another one leads."""

from contextlib import ExitStack

import pytest
from guarded_broker import RightsFile
from nodes import Shard
from served import PATIENT

import escrowmq as mq
from escrowmq.broker.serving.listening import listen_tcp
from escrowmq.broker.serving.server import Server
from escrowmq.errors import Code, Denied
from escrowmq.rights import Guard


@pytest.mark.invariant("I45")
def test_a_client_keeps_its_rights_when_another_broker_leads(tmp_path):
    rights = RightsFile(tmp_path)
    shop, reader = rights.add("shop", "send t", "produce p"), rights.add("reader", "read t", "view")
    path = rights.write()
    with ExitStack() as stack:
        shard = Shard(tmp_path, "a", "b")
        stack.callback(shard.close)
        servers = {}
        for node in shard.nodes:
            listener, guard = listen_tcp("127.0.0.1", 0), Guard(path)
            servers[node] = listener.getsockname()[1], Server(node.door, [listener], "test", guard=guard)
            servers[node][1].start()
            stack.callback(servers[node][1].stop)
        addresses = "|".join(f"127.0.0.1:{port}" for port, _ in servers.values())
        a, b = shard.nodes

        def connect(token, at=addresses):
            return stack.enter_context(mq.connect(f"escrow://{at}?replicas=listed", token=token))

        def refusals():
            """What each broker says to whoever is unknown, and the leader to a known caller without the right."""
            for port, _ in servers.values():
                yield connect("emq_wrong", f"127.0.0.1:{port}").producer("p", timeout=PATIENT)
            yield connect(reader).producer("p", timeout=PATIENT)

        producer = connect(shop).producer("p", timeout=PATIENT)
        producer.send("t", b"1")
        for leader, other in ((a, b), (b, None)):
            codes = []
            for refused in refusals():
                with pytest.raises(Denied) as caught:
                    refused.send("t", b"x")
                codes.append(caught.value.code)
            assert codes == [Code.UNAUTHENTICATED, Code.UNAUTHENTICATED, Code.DENIED]
            if other is not None:
                leader.stop()
                servers[leader][1].close_all()
                shard.led_by(other)
                producer.send("t", b"2")
        found = connect(reader).admin.read("t").read_all()
        assert sorted(found["body"].to_pylist()) == [b"1", b"2"]
