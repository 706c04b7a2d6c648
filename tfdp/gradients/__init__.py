"""From the replicas' gradients to their sum: plan, pack, reduce, unpack."""
