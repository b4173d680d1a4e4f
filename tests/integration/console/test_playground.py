"""The playground in a browser: requests of all kinds made from forms, shown as they go on, run by their snippets."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx

from hostile_images import png
from kit.assets import prepared
from kit.console import HOSTILE, PHONE, Opener, told, violations, wider_than
from stock_clients import tool
from support import wait_until
from system import NOOP, Process, System

LOADED_S = 120.0
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
FILE = {"name": "pixel.png", "mimeType": "image/png", "buffer": png(8, 8)}


def SYSTEM() -> dict[str, Any]:
    def model(name: str, source: str, engine: str, *tasks: str) -> dict[str, Any]:
        return {"id": name, "source": source, "engine": engine, "tasks": list(tasks)}

    models = [
        {**NOOP, "tasks": ["text_generation", "summarization", "embedding"]},
        {**NOOP, "id": "slow", "options": {"tokens": 300, "delay_ms": 100}},
        model("caller", str(prepared("tiny-lm")), "text", "text_generation"),
        model("eyes", str(prepared("tiny-image-to-text")), "vision", "image_to_text", "text_generation"),
        model("painter", str(prepared("tiny-image-generation")), "diffusers", "image_generation"),
        model("editor", str(prepared("tiny-image-editing")), "diffusers", "image_editing"),
        model("imaging", "pillow", "imaging", "image_processing"),
    ]
    return {"models": models}


def newest(gateway: Process, task: str) -> dict[str, Any]:
    listed = httpx.get(f"{gateway.url}/v1/requests", params={"task": task, "limit": 1}).json()["data"]
    return gateway.request(listed[0]["request_id"], wait=30)


def named_otherwise(route: Any) -> None:
    """The workers under a `worker.worker_id` whose end is no pid."""
    stats = route.fetch().json()
    route.fulfill(json={**stats, "workers": [{**one, "worker_id": "gpu-1"} for one in stats["workers"]]})


def test_a_chat_takes_tools_images_and_a_conversation(system: System, gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway, "#/playground")
    page.route("**/v1/admin/stats", named_otherwise)
    page.reload()
    told(page, f"kill -9 {system.process('w').popen.pid}   # gpu-1")
    page.unroute("**/v1/admin/stats")
    ask = page.get_by_role("button", name="Ask")
    page.get_by_text("Images and tools").click()
    page.get_by_label("Model").select_option("caller")
    page.get_by_label("Tools").fill("[")
    ask.click()
    assert page.get_by_label("Tools").evaluate("one => one.validationMessage") == "Not valid JSON."
    page.get_by_label("Tools").fill(json.dumps(TOOLS))
    page.get_by_label("Tool choice").select_option("required")
    ask.click()
    told(page, "calls weather", LOADED_S)
    told(page, "completed", LOADED_S)
    assert newest(gateway, "text_generation")["result"]["tool_calls"][0]["function"]["name"] == "weather"
    assert violations(page) == []

    page.get_by_label("Tools").fill("")
    page.get_by_label("image", exact=True).set_input_files(FILE)
    page.get_by_role("button", name="remove image").wait_for()
    page.get_by_label("Model").select_option("eyes")
    page.get_by_label("Conversation id").fill("seen")
    ask.click()
    told(page, "completed", LOADED_S)
    page.get_by_role("link", name="The conversation").click()
    page.get_by_role("img", name="image of offset 0").wait_for()
    items = httpx.get(f"{gateway.url}/v1/conversations/seen/items").json()["data"]
    assert [piece["type"] for piece in items[-1]["content"]] == ["input_image", "input_text"]

    page.goto(f"{gateway.url}/#/playground/conversation_items")
    page.get_by_text("Fields of any request").click()
    page.get_by_label("conversation id").fill("seen")
    page.get_by_role("button", name="Submit").click()
    told(page, "completed")
    page.goto(f"{gateway.url}/#/conversations/seen")
    told(page, "Hello")
    assert page.locator(".turn").count() == len(items) + 1

    page.goto(f"{gateway.url}/#/models")
    told(page, "GiB at most")


def test_texts_are_embedded_and_compared_and_the_snippets_do_the_same(gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway, "#/playground/embedding", color_scheme="dark")
    page.get_by_label("input One a line").press("Control+End")
    page.keyboard.type(f"\nan 'other' C:\\new {HOSTILE}")
    page.get_by_text("Fields of any request").click()
    page.get_by_label("priority").fill("2")
    page.get_by_role("button", name="Submit").click()
    told(page, "4 vectors of")
    table = page.get_by_role("region", name="Cosine of each two")
    assert table.locator("tbody tr").count() == 4
    assert table.locator("tbody tr").nth(3).locator("td").nth(4).inner_text() == "1.000"
    done = newest(gateway, "embedding")
    assert (done["status"], done["priority"], len(done["result"]["embeddings"])) == ("completed", 2, 4)
    assert violations(page) == []
    assert wider_than(page, PHONE) == []

    page.get_by_text("The same by curl").click()
    curl, python, kcat = (one.inner_text() for one in page.locator("details pre").all())
    for command in (["sh", "-c", curl], [sys.executable, "-c", python]):
        assert "completed" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert tool("kcat")
    subprocess.run(["sh", "-c", kcat], check=True, timeout=60)
    wait_until(lambda: gateway.request("a-new-id").get("done"), 30, "what kcat sent is done")
    assert gateway.request("a-new-id")["result"]["embeddings"] == done["result"]["embeddings"]


def test_images_are_made_step_by_step_processed_and_described_and_a_text_is_summed_up(
    gateway: Process, open_page: Opener
) -> None:
    page = open_page(gateway, "#/playground/image_generation")
    submit = page.get_by_role("button", name="Submit")
    page.get_by_label("inference steps").fill("200")
    page.get_by_text("All fields of the payload").click()
    page.get_by_label("guidance scale").press_sequentially("0.05")
    submit.click()
    page.get_by_role("img", name="Preview after step").wait_for(timeout=LOADED_S * 1000)
    told(page, "of 200")
    page.get_by_role("img", name="the image that was made").wait_for(timeout=LOADED_S * 1000)
    assert page.evaluate("document.querySelector('figure img').decode().then(() => true)")
    assert violations(page) == []

    page.get_by_role("link", name="edit", exact=True).click()
    told(page, "Image editing")
    submit.click()
    page.get_by_role("img", name="the image that was made").wait_for(timeout=LOADED_S * 1000)
    edited = newest(gateway, "image_editing")
    assert (edited["status"], len(edited["result"]["images"])) == ("completed", 1)

    page.get_by_role("link", name="process", exact=True).click()
    (image,) = edited["result"]["images"]
    page.get_by_role("img", name=f"image {image['artifact_id']}").wait_for()
    page.get_by_label("operations").fill('[{"op": "resize", "width": 16, "height": 8}]')
    submit.click()
    page.get_by_role("img", name="the image that was made, 16 × 8 pixels").wait_for()

    page.get_by_role("link", name="describe").click()
    told(page, "Image to text")
    submit.click()
    told(page, "completed", LOADED_S)
    assert newest(gateway, "image_to_text")["result"]["text"].strip() in page.inner_text(".answer")

    page.get_by_role("navigation", name="Tasks").get_by_role("link", name="summarization").click()
    page.get_by_label("text The text").fill("A long story. " * 40)
    page.get_by_label("max tokens").fill("0")
    submit.click()
    page.get_by_label("max tokens").fill("9")
    submit.click()
    told(page, "completed", LOADED_S)
    assert newest(gateway, "summarization")["status"] == "completed"

    page.get_by_role("navigation", name="Tasks").get_by_role("link", name="text generation").click()
    page.get_by_label("Model").select_option("slow")
    submit.click()
    page.get_by_role("button", name="cancel this request").click(timeout=20_000)
    told(page, "cancelled", 20)
    assert newest(gateway, "text_generation")["status"] == "cancelled"
