"""What `tfdp X` calls: info, check, plan and merge; bench and launch have rooms."""
