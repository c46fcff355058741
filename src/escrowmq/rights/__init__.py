"""Who may do what: tokens, the rights file, and the right that each call of a broker needs.

``rules.py`` defines the seven kinds of access and the rules of a principal, ``file.py`` reads the rights file,
``tokens.py`` creates tokens, ``matrix.py`` states the right that each call needs, ``guard.py`` authenticates callers,
checks their rights and follows changes of the file. ``failures.py`` slows down whoever guesses tokens.
"""

from escrowmq.rights.failures import Failures
from escrowmq.rights.file import Rights, load, parse
from escrowmq.rights.guard import Caller, Guard
from escrowmq.rights.rules import Access, Need, Principal, Rule, denied

__all__ = ["Access", "Caller", "Failures", "Guard", "Need", "Principal", "Rights", "Rule", "denied", "load", "parse"]
