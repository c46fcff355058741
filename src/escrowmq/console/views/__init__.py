"""The pages, one module per subject. A view is a function of the console and the parameters; it may block."""
