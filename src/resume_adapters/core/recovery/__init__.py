"""A block of training that is run again in the same processes when it fails, with the state that they hold.

Read ``options`` (what a user may set), ``plan`` (where all ranks go on after a failure; pure), ``meeting`` (how they
learn of it and agree, past the training's groups) in the ``launcher_store``, ``starts`` (which start it is, on several
nodes), ``groups`` (the process groups of a block, and how one that is blocked is left), ``own_state`` (what a rank
alone knows, kept outside of its process), ``memory`` (what lies in memory, and where), ``updates`` (whether weights are
being updated), ``pulse`` (when a training has last done something), ``attempt`` (what a training call asks of the block
around it), ``interruption`` (how a thread is led out of what it waits for), ``watch`` (the thread that looks for the
failure of a peer), ``hang`` (whether a rank hangs or is slow), ``stacks`` (where the threads are), ``forked`` (a
process that ends with its parent), ``stand_in`` and ``termination`` (where a process has died), ``supervisor`` and
``signal_relay`` (the process that forks the next one), ``older_objects`` (what the collector of garbage need not look
at), and last ``block``: the loop of attempts.
"""
