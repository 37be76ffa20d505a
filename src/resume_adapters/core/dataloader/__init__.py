"""Where a torch ``DataLoader`` is, and how to restore it.

Read ``tracked`` first (a pass from its beginning), then ``progress`` (what was fetched, and the position made of it),
``next_pass`` (how the next pass begins) and ``prefetch`` (the first fetches of a resumed pass). ``sampler`` and
``instrument`` are put into the loader, ``cursor`` and ``elastic`` are positions on any topology, and ``dispatch`` is
for loaders whose rank zero fetches for all.
"""
