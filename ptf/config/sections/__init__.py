"""The sections of a config, one file each: their keys, with the docstrings that the reference is written from."""
