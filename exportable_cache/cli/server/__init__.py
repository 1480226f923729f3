"""A server with the HTTP interface of OpenAI's completions and chat completions, over one bundle."""
