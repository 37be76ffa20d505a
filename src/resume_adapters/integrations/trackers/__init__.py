"""Experiment trackers: a resumed run continues the tracker's run, and logs nothing there twice."""
