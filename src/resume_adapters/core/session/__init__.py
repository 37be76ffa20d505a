"""One training call of any framework.

Read ``framework.py`` (what an adapter implements), ``session.py`` (the order of events), ``restore.py`` with
``context.py`` (what is resumed), then ``loaders.py`` and ``rescale.py`` (a different topology or batch size).
``finished.py`` refuses a second training in one directory. ``records.py`` is what each rank saves, ``options.py`` what
a user sets, ``messages.py`` what a run logs.
"""
