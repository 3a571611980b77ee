"""Model architectures. The folder is flat because checkpoints ship a modeling file with its imports."""
