"""Plain values that describe a training: topology, buckets, shards, formulas."""
