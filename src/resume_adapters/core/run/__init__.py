"""One start of a run directory: open, begin, save, end a step, leave, close.

Read ``run`` (the facade), ``takeover`` (how a start begins), ``step_control`` (what happens at the end of each step),
then ``monitor`` (what is looked at once a second), ``progress`` (how far a run is) and ``messages``.
"""
