"""Balancing in other frameworks. Importing a module here imports no framework; its `register` does."""
