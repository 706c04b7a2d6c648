"""`tfdp selftest`: whether sums and steps are right on the devices of this machine."""
