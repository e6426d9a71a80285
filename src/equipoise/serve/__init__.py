"""The reference engine: generation with the project's own models, its HTTP API, weight updates while it runs."""
