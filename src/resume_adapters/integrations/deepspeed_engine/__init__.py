"""The state of a DeepSpeed engine, whichever framework drives it.

Read ``engine.py`` first; ``files.py`` and ``names.py`` are its files on disk, ``universal.py`` resumes on a different
number of ranks, ``recovery.py`` is the engine within a restartable block, ``beta_powers.py`` restores what C++
optimizers keep, ``supported.py`` says what is refused.
"""
