"""Where a torch ``DataLoader`` is, and how to restore it.

Read ``tracked`` first (a pass from its beginning), then ``progress`` (what was fetched, and the position made of it),
``next_pass`` (the first fetches of a pass that is resumed) and ``check_batch`` (a batch that is
fetched again to see whether the data are the same). ``sampler``, ``instrument`` and ``worker_rng`` (the random state of
the workers) are put into the loader, ``cursor`` and ``elastic`` are positions on any topology, ``dispatch`` is for
loaders whose rank zero fetches for all, and ``evaluated`` is what changes on the data of evaluations.
"""
