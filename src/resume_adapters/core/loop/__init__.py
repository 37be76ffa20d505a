"""A hand-written training loop that resumes.

Read ``loop.py`` (what a script calls), ``passes.py`` and ``loader.py`` (the loaders of an epoch),
``checkpointing.py`` (what is saved), then ``framework.py`` (what an adapter implements). ``metrics.py`` keeps losses
and best values.
"""
