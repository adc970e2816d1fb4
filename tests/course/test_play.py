"""The model that runs in the book's pages, in headless Chromium, against PyTorch."""

import shutil
import time
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from transformers import AutoTokenizer
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chapters.experiments.adapters import ADAPTERS, load_policy
from solutions.ch0_sampling import encode_prompts
from solutions.ch8_inside import find_direction, only_adapters, steer, truncate_rank
from tests.course.test_browser import CHROMIUM, DRIVER, open_browser
from utils.authoring.book.weights import write_weights
from utils.models.corpus import addition_prompt, held_out_pairs, review_prompts
from utils.models.loading import EMBEDDED_MODEL, load_base_model

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's packages chromium and chromium-driver"
)
BOOK = Path(__file__).parents[2] / "dist" / "book"
STATIC = Path(__file__).parents[2] / "utils" / "authoring" / "book" / "static"
PROMPTS = [addition_prompt(a, b) for a, b in held_out_pairs()[:10]] + review_prompts()[1][:10]
GRPO = "ch3_grpo-25"
LARGEST = 12e6  # bytes of all that a book's pages may need for it
PATIENCE_S = 60


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A page with the first page's widget, beside what the book's build writes."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(STATIC, folder / "_static")
    write_weights(folder / "_static" / "play")
    head = "<!doctype html><meta charset='utf-8'><link rel='icon' href='data:,'>"
    script = "<script src='_static/play.js'></script>"
    (folder / "page.html").write_text(f"{head}{script}<div data-play='front'></div>")
    return folder


@pytest.fixture(scope="module")
def browser():
    driver = open_browser("window-size=800,1200")
    driver.set_script_timeout(PATIENCE_S)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser, site):
    browser.get((site / "page.html").as_uri())
    wait_until_done(browser)
    return browser


def wait_until_done(driver) -> None:
    """Wait until the widget has shown all of its samples."""
    done = "const figure = document.querySelector('[data-play=front]:not([aria-busy]) dd');"
    done += "return Boolean(figure?.textContent.endsWith('of 12'))"
    end = time.monotonic() + PATIENCE_S
    while not driver.execute_script(done):
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(page, job: str, **options):
    """Run a job of the worker for no widget, and return its result."""
    script = "const [job, done] = arguments, element = document.createElement('i');"
    script += "element.dataset.play = 'test'; play.run(element, job).then(done)"
    return page.execute_async_script(script, {"job": job, **options})


def get_logits(page, **policy) -> list[torch.Tensor]:
    """Return the page's logits at each token of each prompt."""
    found = ask(page, "getLogits", prompts=PROMPTS, policy=policy)
    return [torch.tensor(rows) for rows in found]


@torch.no_grad()
def measure_difference(found: list[torch.Tensor], model) -> float:
    """Return the largest difference from PyTorch's logits."""
    worst = 0.0
    for prompt, logits in zip(PROMPTS, found, strict=True):
        ids, mask = encode_prompts(model, [prompt], 0, prepend_bos=True)
        worst = max(worst, (model(ids, attention_mask=mask)[0] - logits).abs().max().item())
    return worst


@pytest.fixture(scope="module")
def grpo():
    """GRPO's last policy in PyTorch, on weights rounded as the page's are."""
    return round_base(load_policy(ADAPTERS / f"{GRPO}.safetensors"))


def round_base(model):
    """Round a model's frozen weights to float16, as the page's are."""
    for parameter in model.base.original_model.parameters():
        parameter.data.copy_(parameter.data.half())
    return model


# --- The engine -----------------------------------------------------------------------------------


def test_logits_of_the_base(page, grpo):
    with grpo.reference():
        assert measure_difference(get_logits(page), grpo) < 1e-4


@pytest.mark.parametrize("name", sorted(path.stem for path in ADAPTERS.glob("*.safetensors")))
def test_logits_of_each_adapter(page, name):
    model = round_base(load_policy(ADAPTERS / f"{name}.safetensors"))
    assert measure_difference(get_logits(page, adapter=name), model) < 1e-4


def test_float16_changes_little(page):
    assert measure_difference(get_logits(page), load_base_model("embedded", "cpu")) < 1e-2


@pytest.mark.parametrize("strength", [0.3, 0.75, 1.5])
def test_logits_at_other_strengths(page, strength):
    model = round_base(load_policy(ADAPTERS / f"{GRPO}.safetensors", strength))
    found = get_logits(page, adapter=GRPO, strength=strength)
    assert measure_difference(found, model) < 1e-4


def test_logits_with_some_sites(page, grpo):
    sites = ["blocks.0.attn.q", "blocks.1.mlp.in", "blocks.1.attn.v", "blocks.3.mlp.out"]
    found = get_logits(page, adapter=GRPO, sites=sites)
    with only_adapters(grpo, lambda site: site in sites):
        assert measure_difference(found, grpo) < 1e-4
    assert measure_difference(found, grpo) > 0.1


@pytest.mark.parametrize("rank", [1, 3])
def test_logits_with_a_lower_rank(page, grpo, rank):
    found = get_logits(page, adapter=GRPO, rank=rank)
    with truncate_rank(grpo, rank):
        assert measure_difference(found, grpo) < 1e-4
    assert measure_difference(found, grpo) > 0.01


def test_logits_of_the_steered_base(page, grpo):
    prompt, prompts = PROMPTS[0], PROMPTS[1:6]
    wanted = {"adapter": GRPO, "prompts": prompts, "layer": 2, "scale": 1.5}
    script = """
        const [job, done] = arguments, element = document.createElement("i");
        element.dataset.play = "test";
        play.run(element, job, ({logits}) => done([...logits]))
    """
    job = {"job": "sample", "prompt": prompt, "steer": wanted}
    found = torch.tensor(page.execute_async_script(script, job))
    name = "blocks.2.hook_out"
    direction = find_direction(grpo, *encode(grpo, prompts, name))
    ids, mask = encode_prompts(grpo, [prompt], 0, prepend_bos=True)
    with torch.no_grad(), steer(grpo, name, direction, 1.5):
        assert (grpo(ids, attention_mask=mask)[0, -1] - found).abs().max() < 1e-3


def encode(model, prompts: list[str], name: str) -> tuple:
    ids, mask = encode_prompts(model, prompts, 0, prepend_bos=True)
    return ids, name, mask


def test_the_tokenizer(page):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    texts = [*PROMPTS, "I've  found\n\n the plot, in 1994: naïve — “great”!", " ", "12345 a1b"]
    script = """
        const tokenizer = new (makeEngine().Tokenizer)(TOKENIZER);
        const found = arguments[0].map(text => tokenizer.encode(text));
        return found.map(tokens => [tokens, tokenizer.decode(tokens)])
    """.replace("TOKENIZER", (EMBEDDED_MODEL / "tokenizer.json").read_text())
    for text, (ids, decoded) in zip(texts, page.execute_script(script, texts), strict=True):
        assert ids == [tokenizer.bos_token_id, *tokenizer(text).input_ids]
        assert decoded == text or not text.isascii()  # a token may be half a character


@pytest.mark.parametrize("settings", [(0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.8), (0.7, 9, 0.6)])
def test_temperature_top_k_and_top_p(page, settings):
    temperature, top_k, top_p = settings
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2
    script = "return [...makeEngine().truncate(Float32Array.from(arguments[0]), arguments[1])]"
    given = {"temperature": temperature, "topP": top_p, **({"topK": top_k} if top_k else {})}
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    expected = TopPLogitsWarper(top_p)(None, scores).softmax(-1)[0]
    found = torch.tensor(page.execute_script(script, logits.tolist(), given))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_draws_follow_the_probabilities_and_the_seed(page):
    script = """
        const {makeRandom, draw} = makeEngine(), random = makeRandom(arguments[1]);
        return Array.from({length: 20000}, () => draw(arguments[0], random()))
    """
    probs = [0.5, 0.3, 0.0, 0.15, 0.05]
    first, again, other = (page.execute_script(script, probs, seed) for seed in (1, 1, 2))
    assert first == again != other
    shares = torch.tensor(first).bincount(minlength=5) / len(first)
    assert (shares - torch.tensor(probs)).abs().max() < 0.012  # three standard errors
    assert shares[2] == 0


# --- The first page's widget ----------------------------------------------------------------------


@pytest.fixture
def widget(request, browser, site):
    """The widget on a page of its own, or on the book's first page if that is built."""
    address = {"page": site / "page.html", "book": BOOK / "index.html"}[request.param]
    if not (address.parent / "_static" / "play").exists():
        pytest.skip("needs `make book`")
    browser.get(address.as_uri())
    wait_until_done(browser)
    yield Widget(browser)
    assert browser.get_log("browser") == []
    fetched = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    for name in browser.execute_script(fetched):
        assert name.startswith(("file:", "data:", "blob:"))


class Widget:
    """What a person does with it, and what it says then."""

    def __init__(self, driver):
        self.driver = driver
        self.root = driver.find_element("css selector", "[data-play=front]")
        self.slider = self.root.find_element("css selector", "input[type=range]")
        self.numbers = self.root.find_elements("css selector", "input[type=number]")

    def set_numbers(self, *numbers: int) -> None:
        for field, number in zip(self.numbers, numbers, strict=True):
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(str(number))

    def count(self, figure: str) -> int:
        wait_until_done(self.driver)
        text = self.root.find_element("css selector", f"[data-figure={figure}]").text
        return int(text.split()[0])

    def count_right(self, pairs: list[tuple[int, int]]) -> int:
        found = 0
        for pair in pairs:
            self.set_numbers(*pair)
            right = self.count("right")
            marks = self.root.find_elements("css selector", ".play-answers b")
            assert [mark.text for mark in marks].count("✓") == right
            found += right
        return found


@pytest.mark.parametrize("widget", ["page"], indirect=True)
def test_more_training_more_right_answers(widget):
    pairs = held_out_pairs()[:6]  # 72 answers
    before = widget.count_right(pairs)
    assert widget.count("worked") < 8
    widget.slider.send_keys(*[Keys.ARROW_RIGHT] * 20)
    assert widget.slider.get_attribute("aria-valuetext") == "1.00"
    after = widget.count_right(pairs)
    assert widget.count("worked") > 8
    assert before <= 0.6 * 72
    assert after >= 0.8 * 72
    assert widget.root.find_element("css selector", "[aria-live]").get_attribute("textContent")


@pytest.mark.parametrize("widget", ["page", "book"], indirect=True)
def test_numbers_that_the_model_does_not_know(widget):
    widget.set_numbers(5, 20)
    warning = widget.root.find_element("css selector", "[role=alert]")
    assert "10 to 99" in warning.text
    assert [n.get_attribute("aria-invalid") for n in widget.numbers] == ["true", "false"]
    widget.set_numbers(50, 20)
    assert warning.text == ""
    assert widget.count("right") >= 0


def test_the_weights_are_small_enough(site):
    files = list((site / "_static" / "play").iterdir())
    assert sum(path.stat().st_size for path in files) < LARGEST
