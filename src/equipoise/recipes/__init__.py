"""Presets: TOML files that `equipoise train NAME` finds by name."""
