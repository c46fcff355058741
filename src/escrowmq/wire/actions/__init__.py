"""Actions: small queries and admin operations, with JSON requests and answers. One module per noun; ``table.py``
lists them all.
"""
