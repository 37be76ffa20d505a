"""State as data: captured from live objects, encoded, compared, digested. No disk, no clock, no ranks.

``stateful`` and ``records`` are what is saved, ``encoding`` is how; ``rng`` captures random generators,
``weights``, ``constants``, ``keys`` and ``ddp_buckets`` are of models. ``loading`` loads a state, ``comparison``,
``fingerprint`` and ``sharded_digest`` tell whether two are alike, and ``safe_load`` reads files of torch without
running code, with ``stand_ins`` for what only code could make. ``frozen`` keeps a state as it is from step to step,
``untouched`` reads objects without running code of their classes, and ``safetensors_file`` is a file.
"""
