"""Hosts that exchange arrays over sockets or MPI: no TensorFlow in here."""
