"""A hand-written training loop that resumes.

Read ``loop.py`` (what a script calls), ``passes.py`` and ``loader.py`` (the loaders of an epoch),
``checkpointing.py`` (what is saved), then ``framework.py`` (what an adapter implements). ``metrics.py`` keeps losses
and best values, ``replicas.py`` saves models that differ between the ranks. ``guard.py`` refuses a loop that trains
past the run, ``windows.py`` notices a script that counts batches itself, ``carried.py`` names variables that the script
carries from step to step, ``variables.py`` what they hold and it changes, and ``observed.py`` says where undeclared
state is looked for. ``registered.py`` finds objects, and tells those apart that have no names.
"""
