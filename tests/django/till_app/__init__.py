"""The app of the test project: orders, and tasks about them."""
