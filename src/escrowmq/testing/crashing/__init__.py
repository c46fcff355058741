"""``crash_everywhere``: kills a program between every two of its steps, and verifies by id that both sides agree."""
