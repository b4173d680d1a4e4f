"""`penstock submit image …`: make, change, describe and process images; what is made is saved to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.cli.commands.api_paths import ApiPath
from penstock.cli.commands.common import AsJson, Gateway, errors, print_json, waiting_text
from penstock.cli.commands.following import follow
from penstock.cli.commands.submitting import MaxTokens, Sent, Timeout, left_running, require_completed
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.schemas.image_formats import MEDIA_TYPES, sniff

Out = Annotated[Path, typer.Option("--out", "-o", help="A folder for the images, or the file of a single one.")]
Format = Annotated[str | None, typer.Option("--format", help="png, jpeg or webp.")]
Source = Annotated[str, typer.Argument(help="A file, or a URL that the worker may fetch.")]
Shown = Annotated[str, typer.Argument(help="A file or a URL; - for the newest image of the conversation.")]
Conversation = Annotated[str | None, typer.Option("--conversation", "-c", help="Make it a turn of this conversation.")]


@dataclass(kw_only=True)
class Drawing:
    """How images are drawn."""

    negative: Annotated[str | None, typer.Option("--negative", help="What not to draw.")] = None
    size: Annotated[str | None, typer.Option(help="Width x height in pixels, as 512x512.")] = None
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None
    guidance: Annotated[float | None, typer.Option(help="How strictly the image follows the prompt.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image.")] = None
    n: Annotated[int | None, typer.Option("-n", help="How many images.")] = None

    def fields(self) -> dict[str, Any]:
        """Those of a payload."""
        return {
            "negative_prompt": self.negative,
            **sides(self.size),
            "inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "seed": self.seed,
            "n": self.n,
        }


app = App(
    no_args_is_help=True,
    help="""Make, change, describe or process images. Files are uploaded first; what is made is saved.

Examples:

  penstock submit image generate "a dam at dawn" --size 512x512 --seed 7

  penstock submit image edit dam.png "make it winter" --strength 0.6 -o winter.png

  penstock submit image caption dam.png "How many turbines are there?"

  penstock submit image process dam.png --op resize:width=640 --op convert:format=webp""",
)


@app.command()
def generate(
    gateway: Gateway,
    drawing: Drawing,
    sent: Sent,
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    sampler: Annotated[str | None, typer.Option(help="As euler, ddim or unipc.")] = None,
    image_format: Format = None,
    out: Out = Path(),
    conversation: Conversation = None,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Make images from a prompt.

    Example:

      penstock submit image generate "a dam at dawn" --size 512x512 -n 2 -o pictures/
    """
    payload = {"prompt": prompt, "sampler": sampler, **drawing.fields()}
    body = _body(sent, "image_generation", payload, image_format, conversation)
    _run(gateway, body, out, timeout, as_json=as_json)


@app.command()
def edit(
    gateway: Gateway,
    drawing: Drawing,
    sent: Sent,
    source: Shown,
    prompt: Annotated[str, typer.Argument(help="What to change, or what to draw.")],
    mask: Annotated[
        str | None,
        typer.Option(
            help="A file or URL, as large as the image: transparent where it may change, or white without alpha."
        ),
    ] = None,
    strength: Annotated[float | None, typer.Option(help="How far it may go from the image, above 0 to 1.")] = None,
    image_format: Format = None,
    out: Out = Path(),
    conversation: Conversation = None,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Change an image by a prompt.

    Example:

      penstock submit image edit dam.png "make it winter" --mask sky.png -o winter.png

      penstock submit image edit - "and now in blue" --conversation trip
    """
    payload: dict[str, Any] = {"prompt": prompt, "strength": strength, **drawing.fields()}
    payload["image"] = _shown(gateway, source, conversation)
    payload["mask"] = None if mask is None else image_input(gateway, mask)
    body = _body(sent, "image_editing", payload, image_format, conversation)
    _run(gateway, body, out, timeout, as_json=as_json)


@app.command()
def caption(
    gateway: Gateway,
    sent: Sent,
    source: Shown,
    question: Annotated[str | None, typer.Argument(help="What to ask of it; without one it is described.")] = None,
    max_tokens: MaxTokens = None,
    conversation: Conversation = None,
    timeout: Timeout = 300,
    as_json: AsJson = False,
) -> None:
    """Describe an image, or answer a question about it.

    Example:

      penstock submit caption dam.png "What is in the foreground?"
    """
    payload = {"image": _shown(gateway, source, conversation), "prompt": question, "max_tokens": max_tokens}
    _run(gateway, _body(sent, "image_to_text", payload, None, conversation), None, timeout, as_json=as_json)


@app.command()
def process(
    gateway: Gateway,
    sent: Sent,
    source: Source,
    op: Annotated[list[str], typer.Option("--op", help="An operation, as resize:width=640,fit=contain; in order.")],
    image_format: Format = None,
    out: Out = Path(),
    timeout: Timeout = 300,
    as_json: AsJson = False,
) -> None:
    """Process an image by operations, one after the other.

    Example:

      penstock submit image process dam.png --op crop:left=0,top=0,width=64,height=64 --op flip:axis=horizontal
    """
    operations = [operation(text) for text in op]
    for one in operations:
        if isinstance(one.get("image"), str):
            one["image"] = image_input(gateway, one["image"])
    payload = {"image": image_input(gateway, source), "operations": operations}
    _run(gateway, _body(sent, "image_processing", payload, image_format), out, timeout, as_json=as_json)


def operation(text: str) -> dict[str, Any]:
    """`resize:width=640,fit=contain` as the object of a request. Raises CliFailure (usage)."""
    name, _, arguments = text.partition(":")
    found: dict[str, Any] = {"op": name.strip()}
    for part in filter(None, arguments.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise CliFailure(f"--op {text}: write it as name:argument=value,…", exit_code=ExitCode.USAGE)
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value
    return found


def sides(size: str | None) -> dict[str, int]:
    """`512x256` as width and height. Raises CliFailure (usage)."""
    if size is None:
        return {}
    width, cross, height = size.lower().partition("x")
    if not (cross and width.isdigit() and height.isdigit()):
        raise CliFailure(f"--size {size}: write it as 512x512", exit_code=ExitCode.USAGE)
    return {"width": int(width), "height": int(height)}


def _body(
    sent: Sent, task: str, payload: dict[str, Any], image_format: str | None, conversation: str | None = None
) -> dict[str, Any]:
    output = None if image_format is None else {"format": "jpeg" if image_format == "jpg" else image_format}
    return sent.body(task, payload, output=output, conversation_id=conversation)


def _shown(gateway: Gateway, source: str, conversation: str | None) -> dict[str, str] | None:
    """As `image_input`; None for the newest image of a conversation."""
    if source != "-":
        return image_input(gateway, source)
    if conversation is None:
        raise CliFailure("- is the newest image of a conversation: name it with -c", exit_code=ExitCode.USAGE)
    return None


def _run(gateway: Gateway, body: dict[str, Any], out: Path | None, timeout_s: float, *, as_json: bool) -> None:
    """Submit, show how far it is, save what was made, print it. Raises CliFailure."""
    request_id = gateway.call("POST", "/v1/requests", body=body)["request_id"]
    with left_running(gateway, request_id):
        frame = _outcome(gateway, request_id, timeout_s)
    require_completed(request_id, frame)
    result: dict[str, Any] = frame["result"]
    saved = [] if out is None else save_images(gateway, request_id, result.get("images") or [], out)
    if as_json:
        print_json({**frame, **({"saved": [str(path) for path in saved]} if saved else {})})
        return
    for path in saved:
        typer.echo(str(path))
    if not saved:
        typer.echo(result.get("text") or "")


def _outcome(gateway: Gateway, request_id: str, timeout_s: float) -> dict[str, Any]:
    """The `result` frame; a bar on stderr shows the steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as bar:
        shown = bar.add_task("waiting", total=None)
        for frame in follow(gateway, request_id, timeout_s=timeout_s, submitted=True):
            match frame["type"]:
                case "status":
                    bar.update(shown, description=waiting_text(frame) if frame.get("detail") else frame["status"])
                case "progress":
                    bar.update(shown, description="running", completed=frame["step"], total=frame["steps"])
                case "restarted":
                    bar.update(shown, description="begins again", completed=0)
                case "result":
                    return frame
                case _:
                    pass
    raise AssertionError("a follow ends with its result")


SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif"}
UPLOAD_S = 300.0


def image_input(gateway: Gateway, source: str) -> dict[str, str]:
    """A reference to an image: a URL as it is, a file as the artifact that it becomes. Raises CliFailure."""
    if source.startswith(("http://", "https://")):
        return {"url": source}
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise CliFailure(f"{source} cannot be read: {error.strerror}", exit_code=ExitCode.USAGE) from error
    found = sniff(data)
    if found is None:
        known = ", ".join(MEDIA_TYPES)
        raise CliFailure(f"{source} is not an image of a known format ({known})", exit_code=ExitCode.USAGE)
    made = gateway.upload(data, {"content-type": MEDIA_TYPES[found]}, httpx.Timeout(UPLOAD_S))
    return {"artifact_id": made["id"]}


def save_images(gateway: Gateway, request_id: str, images: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Fetch the images into a folder, or a single one into the file that `out` names. Raises CliFailure."""
    one_file = len(images) == 1 and out.suffix != "" and not out.is_dir()
    saved: list[Path] = []
    for number, image in enumerate(images):
        suffix = SUFFIXES.get(image.get("media_type") or "", ".bin")
        path = out if one_file else out / f"{request_id[:8]}-{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gateway.stream("GET", ApiPath(image["url"]), timeout=httpx.Timeout(UPLOAD_S)) as answer:
            part = path.with_name(f".{path.name}.part")
            with part.open("wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)
            part.replace(path)
        saved.append(path)
    return saved
