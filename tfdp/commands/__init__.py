"""What `tfdp X` calls: info, check, plan, merge; bench and launch have rooms of their own."""
