"""One start of a run directory: open, begin, save, end a step, leave, close.

Read ``context`` (what all parts have in common), ``run`` (how a run is opened and left), ``takeover`` (how a start
begins), ``saver`` (how a checkpoint is saved, and what follows one that failed), ``step_control`` (what happens at the
end of each step), then ``monitor`` (what is looked at once a second).
"""
