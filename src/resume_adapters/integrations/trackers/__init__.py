"""Experiment trackers (W&B, MLflow, TensorBoard): a resumed run continues the tracker's run, with each value once.

Read ``runs`` first: what a checkpoint saves of the trackers, and what a resume does with it. ``deduplicate`` has, for
each tracker, the method that skips what its run already has, and ``checkpoints`` which of them read checkpoints.
"""
