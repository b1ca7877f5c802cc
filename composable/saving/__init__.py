"""Full values out of the shards and into them, state dicts, and the folder of checkpoints."""
