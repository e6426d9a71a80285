"""What a run can be seen by: load traces."""
