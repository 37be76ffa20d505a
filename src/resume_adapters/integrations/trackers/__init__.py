"""Experiment trackers (W&B, MLflow, TensorBoard): a resumed run continues the tracker's run.

Read ``runs`` first: what a checkpoint saves of the trackers, and what a resume does with it. ``checkpoints`` has which
of them read checkpoints.
"""
