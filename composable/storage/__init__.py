"""What owns the memory: shards, unsharded buffers, gradients, and the two faces of a parameter."""
