"""/v1/responses: OpenAI's items and events over the service that all conversations share."""
