"""Half messages without check-back, repaired by two sets of ids: what was announced less what had its effect.

The producer ends its transactions one way and announces each committed one by its id, in a second topic. Whoever handles a
message records its id in the *commit set*, together with the effect; whoever reads the announcements records them in the *half set*.
On a schedule half − commit is taken: each id in it is looked up and handled, once, however often it is found.
"""
