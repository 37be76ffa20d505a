"""The ``.resume`` directory, and what is done once for a run directory.

Read ``control`` (the files, the stop file among them), ``status`` with ``publisher`` (the states of a run),
``fencing`` and ``journal`` with ``launches`` (launches without progress), then ``upkeep`` and ``prune`` (maintenance),
``placeholder`` (before the first commit), ``siblings`` (runs that a launch may have meant to continue), and last
``discovery`` (run directories of nodes) and ``identity`` (which run it is).
"""
