"""What `tfdp X` calls: info, check, merge; bench and launch have rooms of their own."""
