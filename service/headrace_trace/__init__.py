"""`headrace trace`: one request's trace as a page, a picture and an explanation."""
