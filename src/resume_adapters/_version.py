"""The version of this package; here, so that nothing below imports the package root."""

__version__ = "0.1.0"
