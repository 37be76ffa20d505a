"""When a save happens, and who finishes it.

Read ``cadence`` (when), ``engine`` (the interface of what commits a written checkpoint), then ``background`` (the
engine that commits on a thread) and ``failures`` (a save that fails ends the run, or does not).
"""
