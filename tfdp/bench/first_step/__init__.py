"""`tfdp bench first-step`: how long `fit` takes until its first step is done."""
