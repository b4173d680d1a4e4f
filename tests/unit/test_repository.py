"""What every checkout of the repository must be able to hold."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_file_is_a_symbolic_link() -> None:
    """A checkout without symbolic links has text files in their place, with the path as their content."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []
