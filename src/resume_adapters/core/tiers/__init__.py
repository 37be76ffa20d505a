"""Copies of committed checkpoints beyond the run directory: a replacement machine with an empty disk resumes from them.

One rule for every tier: a checkpoint is there when its manifest is there, and the manifest is written last. The run
directory stays the truth, and a resume takes the newest valid checkpoint of all.

Read ``options`` (what the user writes), ``tier`` (what a resume asks of a tier, and how a copy comes to the run
directory), ``mirrors`` (copies to object stores in the background), then ``resume`` (which checkpoint a start takes).
The object store: ``remote`` (the tier: what is where, and which start may add to it), ``object_store`` (the few
operations that it needs, by obstore) and ``hub`` (the same, by huggingface_hub). The memory of each node: ``memory``.
"""
