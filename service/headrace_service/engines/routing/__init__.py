"""Which of a model's engines takes a request: `router` decides."""
