"""The only package that touches a disk.

Read ``base`` (the interface), ``local`` (a mounted file system), ``groups`` (the ranks that share a directory), then
``open_file`` (a file that is written later), ``pieces`` (large files, piece by piece) and ``private``
(directories of one user). ``counting`` is a storage for watched runs, ``diagnosis`` finds out why a write of a
framework failed, ``sockets`` finds and ends the connections of this process, and ``threads`` says what a process that
is forked from it would lack.
"""
