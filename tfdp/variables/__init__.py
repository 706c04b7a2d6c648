"""Variables with a copy on each replica, which replicas update by themselves."""
