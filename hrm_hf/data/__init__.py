"""Builders that turn puzzle sources into `datasets.Dataset`s, and what feeds them to a model.

Nothing here is imported by `import hrm_hf`: `datasets` and `pyarrow` are loaded by the functions that need them.
"""
