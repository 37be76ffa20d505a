"""One checkpoint: from pending to committed, read again, chosen, kept, removed.

Read ``checkpoint`` (the values), ``layout`` (paths, markers, states) and ``manifest``; for a save ``workspace`` (where
it is written at first), ``writer``, ``parts``, ``share`` (between nodes), ``commit`` and ``latest``; for a resume
``catalog``, ``validity``, ``history`` (what the journal knows) and ``resolve``, then ``files``, ``native_files`` and
``distributed_metadata`` (what is loaded); for pruning ``retention``, ``policy_text`` (of a command line) and
``remove``.
"""
