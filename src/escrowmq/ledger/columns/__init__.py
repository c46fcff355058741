"""Storage shapes of the ledger: growing and sparse arrays, due times without a scan, the key hash, codes as integers."""
