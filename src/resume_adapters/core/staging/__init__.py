"""Saves that leave the training after a copy into memory.

Read ``staging`` (which way a save goes), ``capture`` (what a framework writes, as a plan), ``owned`` (what may be
copied later), ``fence`` (nothing changes before it is copied), ``arena`` (the memory), ``writer`` (the process that
writes), then ``memory`` (how much there is), ``readers`` (who may read a
file before its commit) and ``selftest`` (whether the files are those of the libraries).

A staged save: ``run/run.py`` captures what the framework writes -> ``saving/background.py`` copies, on the thread that
commits -> ``writer`` has the files filled by ``storage/fill.py`` -> ``checkpoint/commit.py`` takes their digests.
"""
