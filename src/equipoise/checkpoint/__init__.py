"""Saving and resuming whole training states."""
