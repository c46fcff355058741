"""The tables of the two banks. Each is in a database of its own; what crosses between them is a message."""

import sqlalchemy as sa

NAME = sa.String(64)

bank_a = sa.MetaData()
bank_b = sa.MetaData()


def _accounts(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "user_account",
        metadata,
        sa.Column("user_id", NAME, primary_key=True),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.CheckConstraint("amount >= 0", name="no_overdraft"),
    )


accounts_a = _accounts(bank_a)
accounts_b = _accounts(bank_b)

debits = sa.Table(
    "debits",
    bank_a,
    sa.Column("transfer_id", NAME, primary_key=True),
    sa.Column("user_id", NAME, nullable=False),
    sa.Column("amount", sa.BigInteger, nullable=False),
)

credits = sa.Table(
    "credits",
    bank_b,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("transfer_id", NAME, nullable=False),  # not unique: that it comes once is the receive log's work
    sa.Column("user_id", NAME, nullable=False),
    sa.Column("amount", sa.BigInteger, nullable=False),
)
