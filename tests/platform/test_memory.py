"""Kept memory: what is freed comes back without new pages from the system, or the C library cannot do it."""

import platform
import subprocess
import sys

PROGRAM = """
import resource
from escrowmq.platform.memory import keep_freed_memory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        pieces = [bytes(16 << 10) for _ in range(512)]  # as a message comes off a connection
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(20)
plain = faults(50)
can = keep_freed_memory()
assert keep_freed_memory() is can
faults(20)
print(int(can), plain, faults(50))
"""


def test_freed_memory_is_used_again():
    """Eight megabytes, again and again: each page of theirs would be a fault."""
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    can, plain, kept = map(int, said.stdout.split())
    assert kept < plain / 10 if can else platform.libc_ver()[0] != "glibc"
