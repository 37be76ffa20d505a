"""The only package that touches a disk.

Read ``base`` (the interface, and large files piece by piece), ``local`` (a mounted file system), ``groups`` (the ranks
that share a directory), then ``open_file`` (a file that is written later). ``counting`` is a storage for watched runs,
``diagnosis`` finds out why a write of a framework failed, and ``sockets`` finds and ends the connections of this
process.
"""
