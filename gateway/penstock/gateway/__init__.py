"""The gateway: HTTP, SSE, WebSocket and OpenAI's API in front of the topics. It imports schemas and producers only."""
