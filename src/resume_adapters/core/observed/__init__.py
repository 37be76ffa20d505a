"""State that nobody has declared: found by looking twice, captured and restored where it was found.

``walk`` goes from roots to leaves, by ``paths``, and tells what has changed.
``leaves`` captures and restores. ``when`` has the moments at which a training call looks, ``loaders`` looks at
datasets, samplers and collate functions, and ``variables`` at those of a script, of which ``script`` reads the source
and ``code`` tells what its functions keep;
``epoch_values`` names those that an epoch begins with.
``gradients`` sees which gradients a step leaves for a later one, and ``optimizers`` what steps beside what is saved:
``steps`` tells of each step.
``own_objects`` finds objects that a checkpoint cannot hold, and ``instances`` all of a class.
"""
