"""A suite of questions that take many steps to answer, for any causal language model."""
