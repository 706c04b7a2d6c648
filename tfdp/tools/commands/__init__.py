"""What `tfdp X` calls, but for those that have rooms of their own."""
