"""`tfdp bench links`: small sums of 2 to 64 processes that do nothing else."""
