"""One analysis of a traced step: what each tensor has to do with rows and losses."""
