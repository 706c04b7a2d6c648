"""Variables with a copy on each replica, which replicas update on their own."""
