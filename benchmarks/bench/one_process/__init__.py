"""Cases whose replicas share one process, each case in a process of its own."""
