"""Storage shapes of the ledger: growing arrays, due times without a scan, the key hash, codes as integers."""
