"""Plain values that say what will be done: topology, buckets, shards, formulas."""
