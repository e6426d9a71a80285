"""Token dispatchers: rows to the ranks that own their experts, and back."""
