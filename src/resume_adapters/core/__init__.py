"""The rules of exact resume, free of any training framework.

Packages, lowest first; each imports only from those before it:

=================  ===============================================================================
``state``          state as data: captured, encoded, compared, digested
``observed``       state that nobody has declared: found, captured, restored
``storage``        the only package that touches a disk
``stop``           why and when to stop
``dataloader``     where a torch ``DataLoader`` is, and how to resume it there
``checkpoint``     one checkpoint: from pending to committed, read again, chosen, kept
``trace``          the lines that a watched run writes, and the points at which it stops itself
``run_directory``  ``.resume/``, and what is done once for a run directory
``tiers``          copies of committed checkpoints beyond the run directory
``saving``         when a save happens, how it leaves the training, and who finishes it
``recovery``       a block that is run again in the same processes when it fails
``run``            one start of a run directory: open, begin, save, end a step, leave
``session``        one training call of any framework
``loop``           a hand-written training loop
=================  ===============================================================================

Beside them, for all: ``ranks.py`` (the processes of a run), ``devices.py`` (what is asked of an accelerator),
``log.py`` (what is said to the user), ``patching.py`` (attributes that are replaced for a while), ``choices.py`` (the
words of options) and ``requirements.py`` (versions and arguments).

Seven walks through the code, here with the Trainer's adapter. Whatever else they touch is a leaf.

**A save**: ``hf/patch.py`` (the trainer saves) -> ``hf/session.py`` (under which name) -> ``session/session.py``
(what a checkpoint holds) -> ``run/saver.py`` (a pending checkpoint) -> ``checkpoint/writer.py``, which calls
``hf/framework.py`` (the trainer's own files; ``saving/copied.py`` where they are copied) ->
``saving/engine.py`` -> ``checkpoint/commit.py`` (the marker) -> ``run_directory/prune.py``.

**A start**: ``hf/patch.py`` -> ``hf/session.py`` -> ``session/restore.py`` -> ``run/run.py`` -> ``run/takeover.py``
(fence, choose, tidy) -> ``checkpoint/resolve.py`` -> ``checkpoint/validity.py``; back in ``session/context.py`` and
``hf/framework.py`` for loading and verifying.

**A stop signal**: ``stop/signals.py`` (the flag) -> ``stop/vote.py`` (all ranks at the same step) ->
``run/step_control.py`` (the end of a step) -> ``session/session.py`` -> ``hf/session.py`` (saves) -> ``run/run.py``
(leaves).

**A data position**: ``dataloader/tracked.py`` (the loader) -> ``dataloader/progress.py`` (what was fetched, the
position made of it) -> ``session/loaders.py`` (saved, and restored on this or a different topology) ->
``dataloader/next_pass.py`` (the pass that resumes there).

**State that nobody has declared**: ``hf/observed.py`` (where to look) -> ``observed/when.py`` ->
``observed/walk.py`` (what is there, and what has changed) -> ``observed/paths.py`` -> ``observed/leaves.py``
(captured, and restored). Likewise of what a launch was given: ``hf/observed.py`` -> ``session/settings.py``.

**A copy beyond the run directory**: ``run/saver.py`` (a commit) -> ``tiers/mirrors.py`` (a thread) ->
``tiers/remote.py`` -> ``tiers/object_store.py``. At a start, ``run/takeover.py`` ->
``tiers/resume.py`` (which checkpoint) -> ``tiers/tier.py`` -> ``checkpoint/commit.py``. In memory:
``saving/engine.py`` -> ``tiers/memory.py`` -> ``checkpoint/commit.py``.

**A watched run**, as a drill starts it: ``trace/log.py`` (its lines, and the file operations that it counts through
``storage/base.py``) -> ``trace/points.py`` (where it stops itself) -> ``session/trace.py`` (a line for each step).

**A failure within a restartable block**: ``recovery/block.py`` (the loop of attempts) -> ``recovery/watch.py`` and
``recovery/groups.py`` (a peer fails, and what this rank waits for is cut) -> ``recovery/meeting.py`` ->
``recovery/plan.py`` (all ranks do the same) -> ``session/held.py`` (what a training call holds) -> ``run/saver.py``
(written to memory); the next attempt begins as any start does, from there. Where a process has died, all end, and the
launcher starts them again.

A loop that is written by hand has ``loop/loop.py`` in the place of ``hf/session.py``, and ``loop/guard.py``, which
refuses what trains past it.
"""
