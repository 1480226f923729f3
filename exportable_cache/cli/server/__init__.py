"""A bundle behind the HTTP interface of OpenAI's completions and chat completions."""
