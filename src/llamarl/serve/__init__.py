"""The policy behind HTTP: dialects of OpenAI, Anthropic and vLLM over one backend that answers prompts."""
