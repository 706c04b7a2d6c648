"""What `tfdp X` calls, but for bench and launch, which have rooms of their own."""
