"""Reasoning suite: questions that take many steps to answer, for any causal language model."""
