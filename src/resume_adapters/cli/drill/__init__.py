"""The drill: a user's own command, undisturbed and then with real faults, and whether both did the same.

==============  ==============================================================================================
``trace``       what the launches of a run traced: starts, steps, saves, ends
``faults``      which faults there are, and which of them a seed chooses for a run
``job``         one launch of the command: followed by its trace, paused, killed, signalled
``drill``       the reference runs, the interrupted run
``comparison``  the first difference between two runs, in causal order
``causes``      the likely cause of a difference, in words
``statistics``  whether losses that cannot be equal are as close as those of two undisturbed runs
``report``      all of it judged: as a document, in words, and as a plot of the losses
==============  ==============================================================================================

Read ``drill`` first.
"""
