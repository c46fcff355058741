"""The pages, a file a subject. Each view is a function of the console and of what is asked; it may block."""
