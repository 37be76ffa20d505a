"""One training call of any framework.

Read ``framework.py`` (what an adapter implements) with ``layout.py`` (over which ranks a training is spread),
``session.py`` (the order of events), ``restore.py`` with ``context.py`` (what is resumed), ``fork.py`` (a new run
begins with the weights of another), ``rehearsal.py`` (the first save is loaded back), ``audit.py`` (ranks are compared
on the way), then ``loaders.py`` and
``rescale.py`` (a different topology or batch size). ``settings.py`` compares what a launch was given with what the
checkpoint was saved with, ``trace.py`` writes each step of a watched run, ``finished.py`` refuses a second training in
one directory, and ``numbered.py`` chooses the directory where the framework numbers them.
``records.py`` is what each rank saves, ``held.py`` what a call holds within a restartable
block, ``options.py`` what a user sets, also by the environment, ``new_run.py`` makes the run of it, and
``messages.py`` what a run logs, with the names of the parts.
"""
