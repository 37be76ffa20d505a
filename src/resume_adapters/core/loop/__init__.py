"""A hand-written training loop that resumes.

Read ``loop.py`` (what a script calls), ``passes.py`` and ``loader.py`` (the loaders of an epoch),
``checkpointing.py`` (what is saved), then ``framework.py`` (what an adapter implements) and ``plain.py`` (what torch
alone, and a framework that only wraps it, has of that). ``metrics.py`` keeps losses
and best values, ``replicas.py`` saves models that differ between the ranks. ``guard.py`` refuses a loop that trains
past the run, ``windows.py`` notices a script that counts batches itself, and ``observed.py`` says
where undeclared state is looked for. ``repeated.py`` undoes what a launch does again, ``registered.py`` names objects
that have no names, ``tensors.py`` has what is trained outside of models, and ``asked.py`` refuses a save that one rank
asks for alone.
"""
