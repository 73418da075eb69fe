"""OpenAI's requests, from JSON to what this server's validation takes."""
