"""HTTP as this door speaks it: uvicorn with bounds, one exchange, errors in OpenAI's form."""
