"""A block of training that is run again in the same processes when it fails, with the state that they hold.

Read ``options`` (what a user may set), ``plan`` (where all ranks go on after a failure; pure), ``meeting`` (how they
learn of it and agree, past the training's groups), ``groups`` (the process groups of a block, and how one that is
blocked is left), ``memory`` (where a checkpoint is written after a failure), ``updates`` (whether weights are being
updated), ``hang`` (whether a rank hangs or is slow), ``attempt`` (what a training call asks of the block around it),
``watch`` (the thread that looks for the failure of a peer, and what ends a process in any case), and last ``block``:
the loop of attempts.

A process that dies, or that cannot be led out of what it does, is the launcher's: the others end, within limits.
"""
