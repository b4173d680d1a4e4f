"""The entry point of the command `penstock`. Each command is a module, imported only when it is run or listed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from penstock.cli.failures import CliFailure, ExitCode, failure_of
from penstock.cli.option_groups import App
from penstock.common.process_end import run_command
from penstock.schemas.errors import BrokerUnavailable, ExecutionTimeout, Expired, PenstockError, RegistryUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Where a command lives: a module with a Typer called `app` (sub-commands), or with a function of that name."""

    module: str
    function: str | None = None


COMMANDS: dict[str, Command] = {
    "up": Command(module="penstock.cli.up", function="up"),
    "status": Command(module="penstock.cli.up", function="status"),
    "logs": Command(module="penstock.cli.up", function="logs"),
    "down": Command(module="penstock.cli.up", function="down"),
    "chat": Command(module="penstock.cli.commands.chat", function="chat"),
    "submit": Command(module="penstock.cli.commands.submit"),
    "watch": Command(module="penstock.cli.commands.watch", function="watch"),
    "requests": Command(module="penstock.cli.commands.requests"),
    "conversations": Command(module="penstock.cli.commands.conversations"),
    "artifacts": Command(module="penstock.cli.commands.artifacts"),
    "models": Command(module="penstock.cli.commands.models"),
    "workers": Command(module="penstock.cli.commands.workers"),
    "devices": Command(module="penstock.cli.commands.workers", function="devices"),
    "stats": Command(module="penstock.cli.commands.stats"),
    "dlq": Command(module="penstock.cli.commands.dlq"),
    "keys": Command(module="penstock.cli.commands.keys"),
    "audit": Command(module="penstock.cli.commands.audit", function="audit"),
    "schemas": Command(module="penstock.cli.commands.schemas"),
    "bench": Command(module="penstock.cli.commands.bench"),
    "demo": Command(module="penstock.cli.commands.demo"),
    "broker": Command(module="penstock.cli.broker", function="broker"),
    "topics": Command(module="penstock.cli.topics"),
    "worker": Command(module="penstock.cli.serve", function="worker"),
    "gateway": Command(module="penstock.cli.serve", function="gateway"),
    "bridge": Command(module="penstock.cli.serve", function="bridge"),
    "webhooks": Command(module="penstock.cli.serve", function="webhooks"),
    "summarizer": Command(module="penstock.cli.serve", function="summarizer"),
    "config": Command(module="penstock.cli.config_commands"),
    "doctor": Command(module="penstock.cli.doctor", function="doctor"),
}

HELP = """Penstock: inference requests flow in on Kafka, a gate admits them to the models, results flow back.

Everything on this machine, with a small real model:   penstock up

Then, in another terminal:

  penstock chat

  penstock submit "What is the capital of France?"

  penstock bench --concurrency 8 --duration 10

The parts one by one, on a Kafka of your own:

  penstock topics create --bootstrap-servers kafka:9092

  penstock worker --config penstock.toml

  penstock gateway --config penstock.toml

  penstock bridge --config penstock.toml

  penstock webhooks --config penstock.toml

  penstock summarizer --config penstock.toml

Something is wrong?   penstock doctor

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unreachable, 4 timed out, 130 interrupted."""


class LazyGroup(TyperGroup):
    """Commands in the order of COMMANDS; failures that a person can mend end in one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, command in COMMANDS.items() if find_spec(command.module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        if command is None or find_spec(command.module) is None:
            return None
        return load(cmd_name, command)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (CliFailure, PenstockError) as failure:
            typer.echo(f"penstock: {failure}", err=True)
            raise typer.Exit(exit_code_of(failure)) from failure
        except BrokenPipeError as error:
            sys.stderr.close()
            raise typer.Exit(0) from error
        except OSError as error:
            failure = failure_of(error)
            typer.echo(f"penstock: {failure}", err=True)
            raise typer.Exit(int(failure.exit_code)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from error


def exit_code_of(failure: CliFailure | PenstockError) -> int:
    """What the shell is told about a failure."""
    match failure:
        case CliFailure():
            return int(failure.exit_code)
        case BrokerUnavailable() | RegistryUnavailable():
            return int(ExitCode.UNREACHABLE)
        case ExecutionTimeout() | Expired():
            return int(ExitCode.TIMED_OUT)
        case _:
            return int(ExitCode.FAILED)


def load(name: str, command: Command) -> Any:
    """Import a command's module and build the command that Typer runs."""
    module = import_module(command.module)
    # Rich would take `[kafka]` in a help text for markup and leave it out.
    parent = App(add_completion=False, rich_markup_mode=None)
    if command.function is None:
        module.app.rich_markup_mode = None
        parent.add_typer(module.app, name=name)
        group: Any = typer.main.get_command(parent)
        return group.commands[name]
    parent.command(name)(getattr(module, command.function))
    return typer.main.get_command(parent)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=HELP,
)


def print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and end.", is_eager=True, callback=print_version
    ),
) -> None:
    """Replaced below: the text is HELP."""


root.__doc__ = HELP


def main() -> NoReturn:
    """Run the command line; ends the process."""
    run_command(lambda: typer.main.get_command(app)(prog_name="penstock"))


if __name__ == "__main__":
    main()
