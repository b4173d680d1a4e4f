"""The native routes and the sockets: what comes over HTTP and WebSocket, put as questions to the service."""
