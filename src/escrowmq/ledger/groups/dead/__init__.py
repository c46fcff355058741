"""Dead letters of consumer groups: what died when and why, a page of them, and their causes summed up."""
