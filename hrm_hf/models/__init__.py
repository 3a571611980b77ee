"""The architectures. Flat on purpose: a checkpoint carries its modeling file and that file's siblings, nothing else."""
