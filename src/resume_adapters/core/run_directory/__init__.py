"""The ``.resume`` directory, and what is done once for a run directory.

Read ``journal`` and ``status`` (the states of a run), ``launches`` (how each ended, and where the time went),
``control`` (the files, fencing and the stop file among them), then ``upkeep`` and ``prune`` (maintenance), ``siblings``
(runs that a launch may have meant to continue), and last ``discovery`` (run directories of nodes, and which run it is).
"""
