"""The ``.resume`` directory, and what is done once for a run directory.

Read ``control`` (the files), ``status`` with ``publisher`` (the states of a run), ``fencing``, ``stop_file`` and
``journal`` with ``launches`` (launches without progress), then ``upkeep`` and ``prune`` (maintenance), ``leftovers``
(what could not be removed), ``free_space``, ``placeholder`` (before the first commit), ``siblings`` (runs that a
launch may have meant to continue), and last ``discovery`` (run directories of nodes) and ``identity`` (which run it
is).
"""
