"""Model architectures. The folder is flat because checkpoints ship a modeling file and its siblings."""
