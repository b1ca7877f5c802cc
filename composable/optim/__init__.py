"""A torch optimizer's step on local tensors, and what it needs to know of parameters."""
