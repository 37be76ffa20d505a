"""The demo: a training run that is killed three times, compared with one that is never killed.

Read ``run`` first. ``kills`` starts and kills a process; ``result`` is shown by ``report`` and ``plot``.
"""
