"""The pages of `tfdp plan` and `tfdp simulate` fit a phone."""

import re
import shutil
import subprocess

import pytest

from tests.support.pictures import pictures_in
from tfdp.tools.commands import cli
from tfdp.tools.planning.answer import Answer
from tfdp.tools.planning.memory_plan import MemoryPlan
from tfdp.tools.planning.ways import Way

PHONE, SCREEN = 400, 1280
LONG_NAME = "a/folder/with/a/long/name/and/another/one/in/it/train_a_model.py"
# Prints by how many pixels each page is wider than its frame.
FRAMES = """<body><script>
for (const [name, width] of {frames}) {{
  const frame = document.createElement("iframe");
  frame.src = name; frame.width = width; frame.height = 800;
  frame.onload = () => {{
    const page = frame.contentDocument.documentElement;
    const line = document.createElement("p");
    const over = page.scrollWidth - page.clientWidth;
    line.textContent = `${{name}} at ${{width}}: ${{over}}`;
    document.body.appendChild(line);
  }};
  document.body.appendChild(frame);
}}
</script></body>"""


def plan_page():
    parts = {"weights": 50_000_000, "activations": 250_000_000}
    plan = MemoryPlan(128, 2, "none", False, parts, 200_000_000, 1e10, 10, 10)
    names = ('shard="optimizer" and tfdp.remat(model, "segments")', "another")
    ways = [Way(name, 250_000_000, False, -0.001, 50_000_000) for name in names]
    return Answer(LONG_NAME, plan, plan, ways).page()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "plan.html").write_text(plan_page())
    words = "simulate --hardware v100-100gbit --model resnet50 --devices 1 2 4 8 16"
    plot = str(folder / "simulate.html")
    assert cli.main([*words.split(), "--plot", plot]) == 0
    return folder


def outside_of_scrolls(page):
    return re.sub(r'<div class="scrolls">.*?</div>', "", page, flags=re.S)


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_what_is_wider_than_a_phone_shrinks_or_scrolls(name, pages):
    page = (pages / f"{name}.html").read_text("utf-8")
    assert '<meta name="viewport" content="width=device-width">' in page
    assert "img { max-width: 100%; height: auto; }" in page
    assert ".scrolls { overflow-x: auto; }" in page
    rest = outside_of_scrolls(page)
    assert "<table" not in rest and "<pre" not in rest
    assert len(pictures_in(page)) >= 1


def test_a_way_that_computes_no_more_has_no_minus_before_its_zero():
    page = plan_page()
    assert "+0%" in page and "-0%" not in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_needs_no_sideways_scrolling(pages):
    frames = [
        [f"{name}.html", width]
        for name in ("plan", "simulate")
        for width in (PHONE, SCREEN)
    ]
    (pages / "frames.html").write_text(FRAMES.format(frames=frames))
    done = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu"),
            *("--allow-file-access-from-files", "--virtual-time-budget=5000"),
            *("--dump-dom", (pages / "frames.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.findall(r"<p>(\S+) at (\d+): (-?\d+)</p>", done.stdout)
    assert len(found) == len(frames), done.stderr
    assert [each for each in found if int(each[2]) > 0] == []
