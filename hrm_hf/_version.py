"""The version, in a module that setup.cfg can read without importing torch."""

__version__ = "0.1.0"
