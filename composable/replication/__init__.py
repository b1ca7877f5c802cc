"""The gradient buckets of ``replicate``, and their averaging."""
