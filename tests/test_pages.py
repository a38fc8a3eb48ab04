"""Tutorials and how-to pages run as they are printed, and print what stands under them."""

import re
from pathlib import Path

import pytest

from tests.forked import run_ranks
from tests.launch import ROOT
from tests.pages import differs, path_of, printed, read

PAGES = sorted(
    str(path.relative_to(ROOT)) for folder in ("tutorials", "how-to") for path in (ROOT / "docs" / folder).glob("*.md")
)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_says(page: str, tmp_path: Path) -> None:
    steps = read((ROOT / page).read_text(), tmp_path)
    for step, output in zip(steps, printed(steps, tmp_path), strict=True):
        if step.expected is None:
            assert "Traceback" not in output, f"{page}: {step.code}\n{output}"
            assert not output, f"{page} does not show what this prints:\n{step.code}\n{output}"
        else:
            assert not differs(output, step.expected), f"{page}: {step.code}\nprints\n{output}"


@pytest.mark.slow
def test_the_tutorials_script_sends_everything_when_it_is_told_to(tmp_path: Path) -> None:
    text = path_of("tutorials/torch").read_text()
    read(text, tmp_path)
    (how,) = re.findall(r"^`python train\.py (.*)` in its place, .* sends everything\.", text, re.MULTILINE)
    assert "\n1.0 times fewer than plain averages\n" in run_ranks(tmp_path / "train.py", 2, how)


def test_pages_are_short() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]}
    long = {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > 200}
    assert not long, f"split these by their readers, 200 lines are enough: {long}"


def test_what_a_page_says_is_compared() -> None:
    said = "loss 1.25 after 3 steps\n"
    assert not differs("loss 1.26 after 3 steps\n", said)
    assert differs("loss 1.27 after 3 steps\n", said)
    assert differs("loss 1.25 after 4 steps\n", said)
    assert differs("loss 1.25 after 3 steps\nTraceback\n", said)


def test_the_messages_in_troubleshooting_are_those_of_the_code() -> None:
    sources = [
        path.read_text() for room in ("core", "torch_backend", "jax_backend") for path in (ROOT / room).rglob("*.py")
    ]
    code = re.sub(r'"\s+f?"', "", "\n".join(sources))  # messages are written over several lines
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 15
    missing = [message for message in messages if message not in code]
    assert not missing, f"the page quotes what no code says: {missing}"
