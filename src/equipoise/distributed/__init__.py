"""The world of ranks: joining it, its meshes and process groups, failures that name who is missing."""
