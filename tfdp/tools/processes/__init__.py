"""Child processes of a tool: started, asked, and ended together."""
