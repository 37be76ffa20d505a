"""One start of a run directory: open, begin, save, end a step, leave, close.

Read ``context`` (what all parts have in common), ``run`` (how a run is opened and left), ``takeover`` (how a start
begins), ``saver`` (how a checkpoint is saved), ``step_control`` (what happens at the end of each step), then
``ownership`` (whether a later start owns the run directory), ``monitor`` (what is looked at once a second),
``progress`` (how far a run is) and ``messages``.
"""
