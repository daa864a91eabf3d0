"""Load on any OpenAI-compatible server: when requests are due, what came back and when, and the figures."""
