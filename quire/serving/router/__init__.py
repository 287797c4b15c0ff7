"""`quire route`: a reverse proxy in front of servers that speak OpenAI's API, of one model or of many."""
