"""The architectures, in a flat folder: checkpoints ship a modeling file and only its siblings."""
