"""`headrace plan`: how many GPUs hold a model and its users."""
