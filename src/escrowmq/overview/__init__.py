"""The state of messages, and the causes: one timeline of anything over brokers and databases, pending work by its
cause, and how everything stands.

:func:`timeline` looks for a message id, a key, a transaction or a business key; :func:`waiting` groups pending work,
with the selection of a plan for each group; :func:`status` is one screen. All of it is read, nothing is changed; who is
away is named in ``missing``.
"""

from escrowmq.overview.standing import status
from escrowmq.overview.stories.timeline import timeline
from escrowmq.overview.values import Cause, Event, Offer, Status, Story, Timeline
from escrowmq.overview.waits.waiting import waiting

__all__ = ["Cause", "Event", "Offer", "Status", "Story", "Timeline", "status", "timeline", "waiting"]
