"""Configuration tree, trainer, optimizer, schedule, metrics and console."""
