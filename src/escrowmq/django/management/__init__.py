"""Management of the app."""
