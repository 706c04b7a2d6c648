"""How far `tfdp plan` is from what trainings take: `python -m tests.planning -h`."""
