"""A generation's events as OpenAI's JSON: chunks of a stream, or one answer."""
