"""The only package that touches a disk."""
