"""Transports: how replica weights reach their hosts and replica gradients come home."""
