"""A no-op LitAPI, for the peer's environment: reads a chat, answers a fixed text. usage: litserve_app.py PORT"""

# pyright: reportMissingImports=false
import sys
from typing import Any

import litserve
from fastapi import Request


class NoopApi(litserve.LitAPI):
    """What a chat route does at the least: reads the body, runs a step in its worker process, answers in the shape."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: Request) -> str:
        return request["messages"][-1]["content"]  # type: ignore[index]  # LitServe hands the parsed body in

    def predict(self, prompt: str) -> str:
        return "word0 "

    def encode_response(self, output: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": output}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


if __name__ == "__main__":
    server = litserve.LitServer(NoopApi(api_path="/v1/chat/completions"), accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
