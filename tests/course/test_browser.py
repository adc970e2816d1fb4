"""A student's first minutes, in JupyterLab in a real browser (headless Chromium)."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from utils.authoring import stubs
from utils.authoring.notebooks import CHAPTERS, ROOT

CHAPTER, EXERCISE = "ch3_grpo", "group_advantages"
NOTEBOOK = "jupyterapp.shell.currentWidget.content"
PATIENCE_S = 240  # a kernel that imports torch on a busy machine
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"
)
pytestmark = [pytest.mark.takes_long, needs_browser]


@pytest.fixture
def folder():
    """A copy of the chapter below the course's folder, as the set-up cell looks upwards."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as name:
        shutil.copy(CHAPTERS / f"{CHAPTER}.ipynb", name)
        yield Path(name)


@pytest.fixture
def address(folder, monkeypatch):
    """JupyterLab on a free port, with every cell in the page however far down."""
    monkeypatch.setenv("COURSE_PROGRESS", str(folder / "progress.json"))
    settings = folder / "settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += ["--IdentityProvider.token=student", "--LabApp.expose_app_in_browser=True"]
    command += [f"--ServerApp.root_dir={folder}", f"--LabApp.user_settings_dir={folder}/settings"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r"http://(?:localhost|127\.0\.0\.1):\d+", line):
                break
        yield f"{found[0]}/lab/tree/{CHAPTER}.ipynb?token=student"
    finally:
        server.terminate()
        server.communicate(timeout=30)


def open_browser(*flags):
    """Start Chromium without a window, and keep what its console says."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", *flags):
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))


@pytest.fixture
def page(address):
    driver = open_browser("window-size=1400,1000")
    driver.set_script_timeout(PATIENCE_S)
    try:
        driver.get(address)
        yield Page(driver)
    finally:
        driver.quit()


class Page:
    """The open notebook, by the elements and the commands that JupyterLab gives a person."""

    def __init__(self, driver):
        self.driver = driver
        ready = "return Boolean(window.jupyterapp?.shell.currentWidget?.content?.widgets?.length)"
        self.wait(lambda: self.run(ready))
        self.run_async("await jupyterapp.shell.currentWidget.sessionContext.ready")

    def wait(self, condition):
        end = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.2)
        return found

    def run(self, script: str, *args):
        return self.driver.execute_script(script, *args)

    def run_async(self, script: str, *args):
        """A script that awaits; its last argument is selenium's."""
        done = "const done = arguments[arguments.length - 1];"
        whole = f"{done} (async () => {{ {script} }})().then(done)"
        return self.driver.execute_async_script(whole, *args)

    def find(self, start: str) -> int:
        """The number of the cell that begins so."""
        sources = self.run(f"return {NOTEBOOK}.widgets.map(w => w.model.sharedModel.source)")
        return next(i for i, source in enumerate(sources) if source.startswith(start))

    def has_tag(self, index: int, tag: str) -> bool:
        tags = self.run(f"return {NOTEBOOK}.widgets[arguments[0]].model.getMetadata('tags')", index)
        return tag in (tags or [])

    def write(self, index: int, source: str) -> None:
        model = f"{NOTEBOOK}.widgets[arguments[0]].model.sharedModel"
        self.run(f"{model}.setSource(arguments[1])", index, source)

    def run_cell(self, index: int) -> str:
        """Select a cell, run it, and read what is below it."""
        select = f"{NOTEBOOK}.activeCellIndex = arguments[0]; {NOTEBOOK}.deselectAll();"
        self.run_async(f"{select} await jupyterapp.commands.execute('notebook:run-cell')", index)
        outputs = self.cell(index).find_elements("css selector", ".jp-OutputArea-output")
        return "\n".join(output.text for output in outputs)

    def cell(self, index: int):
        found = self.driver.find_elements("css selector", ".jp-Notebook .jp-Cell")[index]
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        return found


def test_a_failing_check_a_filled_in_cell_and_a_hint(page):
    first = page.find("# Set-up")
    assert "exercises solved" in page.run_cell(first)
    page.run_cell(first + 1)  # the imports
    stub = page.find(stubs.cut_exercise(CHAPTER, EXERCISE).stub[:60])
    for index in range(first + 2, stub):
        if page.has_tag(index, "given"):
            page.run_cell(index)
    page.run_cell(stub)
    assert "not written yet" in page.run_cell(stub + 1)
    solution = stubs.cut_exercise(CHAPTER, EXERCISE).solution
    page.write(stub, solution.replace("groups - groups.mean(-1, keepdim=True)", "groups"))
    page.run_cell(stub)
    printed = page.run_cell(stub + 1)
    assert "✗" in printed
    assert "expected" in printed
    page.write(stub, solution)
    page.run_cell(stub)
    printed = page.run_cell(stub + 1)
    assert "✓" in printed
    assert "✗" not in printed
    hint = page.cell(stub + 2).find_element("tag name", "details")
    assert hint.get_attribute("open") is None
    hint.find_element("tag name", "summary").click()
    assert hint.get_attribute("open") is not None
