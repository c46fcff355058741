"""Result codes as plain integers: NumPy compares a column with an ``IntEnum`` member six times slower."""

from typing import Final

from escrowmq.errors import Code

BAD_QUEUE: Final = int(Code.BAD_QUEUE)
BAD_REQUEST: Final = int(Code.BAD_REQUEST)
BAD_TOPIC_NAME: Final = int(Code.BAD_TOPIC_NAME)
FENCED: Final = int(Code.FENCED)
GROUP_KIND: Final = int(Code.GROUP_KIND)
MESSAGE_ID_TAKEN: Final = int(Code.MESSAGE_ID_TAKEN)
NO_PERMISSION: Final = int(Code.NO_PERMISSION)
OK: Final = int(Code.OK)
TOO_MANY: Final = int(Code.TOO_MANY)
TOO_MANY_OPEN: Final = int(Code.TOO_MANY_OPEN)
TRANSACTION_DECIDED: Final = int(Code.TRANSACTION_DECIDED)
UNKNOWN_SESSION: Final = int(Code.UNKNOWN_SESSION)
UNKNOWN_TOPIC: Final = int(Code.UNKNOWN_TOPIC)
EXPIRED: Final = int(Code.EXPIRED)
UNKNOWN_TRANSACTION: Final = int(Code.UNKNOWN_TRANSACTION)
WRONG_GROUP: Final = int(Code.WRONG_GROUP)
WRONG_SHARD: Final = int(Code.WRONG_SHARD)
