"""The ``.resume`` directory, and what is done once for a run directory.

Read ``control`` (the files), ``status`` (the states of a run), ``fencing`` and ``journal``, then ``upkeep`` and
``prune`` (maintenance), ``placeholder`` (before the first commit), and last ``discovery`` (run directories of nodes).
"""
