"""Saves that leave the training after a copy into memory.

Read ``staging`` (which way a save goes), ``capture`` (what a framework writes, as a plan), ``fence`` (nothing changes
before it is copied), ``arena`` (the memory), then ``writer`` (the process that writes). A walk through a staged save:
``run/run.py`` captures what the framework writes -> ``saving/background.py`` copies, on the thread that commits ->
``staging/writer.py`` has the files filled -> ``checkpoint/commit.py`` takes their digests.
"""
