"""The actions: small questions and admin acts, JSON both ways. One module per noun; ``table.py`` lists them all."""
