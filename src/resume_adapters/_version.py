"""The version of this package; here, so that nothing below imports the package root."""

__version__ = "0.2.0"
