"""The only package that touches a disk.

Read ``base`` (the interface), ``local`` (a mounted file system), then ``groups`` (the ranks that share a directory).
"""
