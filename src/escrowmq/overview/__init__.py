"""Overview of brokers and databases: the history of a message, pending work by its cause, and the state of everything.

:func:`timeline` searches for a message id, a key, a transaction or a business key. :func:`waiting` groups pending work
and gives the selection of a plan for each group. :func:`status` is one screen. All three only read. Brokers and
databases that did not answer are named in ``missing``.
"""

from escrowmq.overview.standing import status, waiting
from escrowmq.overview.stories.timeline import timeline
from escrowmq.overview.values import Cause, Event, Offer, Status, Story, Timeline

__all__ = ["Cause", "Event", "Offer", "Status", "Story", "Timeline", "status", "timeline", "waiting"]
