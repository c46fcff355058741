"""Pages on which an operator changes something outside of plans: groups, topics, one dead letter. Shown first,
confirmed, recorded with its reason.
"""
