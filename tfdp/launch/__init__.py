"""`tfdp launch`: starts the workers of one training, here or on a cluster."""
