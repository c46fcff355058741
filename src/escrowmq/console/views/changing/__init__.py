"""What a person changes manually outside of plans: groups, topics, one dead letter. Shown first, confirmed, recorded
with its reason.
"""
