"""`tfdp measure`: this machine's numbers, as the simulator needs them."""
