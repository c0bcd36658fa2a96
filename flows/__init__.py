"""Each file tells one kind of request, top to bottom."""
