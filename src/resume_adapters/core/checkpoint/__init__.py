"""One checkpoint: from pending to committed, read again, chosen, kept, removed.

Read ``checkpoint`` (the values), ``layout`` (paths, markers, states, ``latest``) and ``manifest``; for a save
``writer``, ``parts`` and ``commit``; for a resume ``catalog``, ``validity`` and ``resolve``, then ``files``,
``native_files`` and ``distributed_metadata`` (what is loaded); for pruning ``retention``,
``remove`` and ``thin``.
"""
