"""A server under load: rounds of requests that arrive at planned times, the same ones for every arm."""
