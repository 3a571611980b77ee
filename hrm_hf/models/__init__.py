"""Model architectures in a flat folder, because a checkpoint ships only a modeling file and siblings."""
