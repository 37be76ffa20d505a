"""The drill: a user's own command, undisturbed and then with real faults, and whether both did the same.

==============  ==============================================================================================
``faults``      which faults there are, and which of them a seed chooses for a run
``job``         one launch of the command: followed by its trace, paused, killed, signalled
``drill``       the reference runs, the interrupted run
``comparison``  the first difference between two runs, in causal order, and its likely cause
``report``      all of it judged, also by statistics where undisturbed runs differ: as a document and in words
==============  ==============================================================================================

Read ``drill`` first.
"""
