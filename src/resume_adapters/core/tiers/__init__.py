"""Copies of committed checkpoints beyond the run directory: a replacement machine with an empty disk resumes from them.

One rule for every tier: a checkpoint is there when its manifest is there, and the manifest is written last. The run
directory stays the truth, and a resume takes the newest valid checkpoint of all.

Read ``options`` (what the user writes), ``tier`` (the interface of a tier, and its retention), ``mirror`` (copies in
the background), ``mirrors`` (all tiers of a run), then ``resume`` (which checkpoint a start takes), ``fetch`` (brings
it to the run directory) and ``copying`` (how a copy is written on this node).
The object store: ``keys`` (what is where), ``store`` (the few operations that are needed of a store, and what messages
hide), ``object_store`` (them, by obstore), ``claims`` (a later start locks an earlier one out), ``transfer`` (files in
parts) and ``remote`` (the tier). The memory of each node: ``memory`` (the tier) and ``held`` (a directory of
checkpoints there).
"""
