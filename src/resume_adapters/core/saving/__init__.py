"""When a save happens, how it leaves the training, and who finishes it.

Read ``cadence`` (when), ``staging`` (which way a save goes), ``copied`` (one that is copied), ``block`` (the memory),
``available_memory`` (how much there is), ``readers`` (who may read a file before its commit), ``engine`` (the threads
that commit), then ``failures`` (a save that fails ends the run, or does not).
"""
