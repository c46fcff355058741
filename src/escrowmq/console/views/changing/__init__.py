"""What a person changes by hand outside of plans: groups, topics, one dead letter. Shown first, confirmed, recorded
with its reason.
"""
