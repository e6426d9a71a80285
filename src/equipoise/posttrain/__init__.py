"""Reinforcement learning with verifiable rewards, on top of the trainer and the engine."""
