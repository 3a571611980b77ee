"""The architectures. Flat on purpose: a checkpoint carries its modeling file and the siblings of that file only."""
