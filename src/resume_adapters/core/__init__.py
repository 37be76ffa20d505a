"""The rules of exact resume, free of any training framework.

Packages, lowest first; each imports only what stands before it:

=================  ===============================================================================
``state``          state as data: captured, encoded, compared, digested
``storage``        the only package that touches a disk
``stop``           why and when to stop
``dataloader``     where a torch ``DataLoader`` is, and how to put it back
``checkpoint``     one checkpoint: from pending to committed, read again, chosen, kept
``run_directory``  ``.resume/``, and what is done once for a run directory
``saving``         when a save happens, and who finishes it
``run``            one start of a run directory: open, begin, save, end a step, leave
``session``        one training call of any framework
``loop``           a hand-written training loop
=================  ===============================================================================
"""
