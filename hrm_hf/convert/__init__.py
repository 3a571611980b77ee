"""Checkpoints of the original implementations, converted to ours and back."""
