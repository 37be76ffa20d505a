"""The trace of a run that is being watched, and the points at which such a run stops itself.

Read ``log`` (the lines, and what a run writes of its saves and prunes), then ``points`` (where it pauses). What is
written of each step is in ``core/session/trace.py``.
"""
