"""One sum of gradients over the replicas, and the features that take part in it."""
