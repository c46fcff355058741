"""Changes outside of plans, to groups, topics or one dead letter: previewed, confirmed, recorded with a reason."""
