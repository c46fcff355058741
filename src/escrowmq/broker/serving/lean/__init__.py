"""The broker's end of the lean carrier (``docs/lean.md``): one thread for all its connections, answers sent by who has them."""
