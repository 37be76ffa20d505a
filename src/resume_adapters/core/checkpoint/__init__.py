"""One checkpoint: from pending to committed, read again, chosen, kept, removed.

Read ``layout`` (paths, markers, states) and ``manifest``; for a save ``writer``, ``parts`` and ``commit``; for a resume
``catalog``, ``validity`` and ``resolve``; for pruning ``retention`` and ``remove``; to compare
two checkpoints ``native_parts``, ``contents`` and ``difference``.
"""
