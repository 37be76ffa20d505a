"""The only package that touches a disk.

Read ``base`` (the interface, and what is done through it), ``local`` (a mounted file system), then ``groups`` (the
ranks that share a directory). ``sockets`` finds and ends the connections of this process.
"""
