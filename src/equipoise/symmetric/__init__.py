"""Memory that every rank of a group reads and writes directly, and what kernels need to take turns in it."""
