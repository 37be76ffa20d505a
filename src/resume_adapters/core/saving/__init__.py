"""When a save happens, how it leaves the training, and who finishes it.

Read ``cadence`` (when), ``staging`` (which way a save goes, and who may read a file before its commit), ``copied`` (one
that is copied), ``block`` (the memory, and how much there is), then ``engine`` (the threads that commit).
"""
