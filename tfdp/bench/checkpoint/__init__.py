"""`tfdp bench checkpoint`: how fast a training is written and read, beside `cp`."""
