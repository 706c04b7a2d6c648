"""`tfdp bench compression`: what each way to compress gradients costs, and saves."""
