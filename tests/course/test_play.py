"""The model that runs in the book's pages, in headless Chromium, against PyTorch."""

import shutil
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from transformers import AutoTokenizer
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chapters.experiments.adapters import ADAPTERS, load_policy
from solutions.ch0_sampling import encode_prompts
from solutions.ch2_ppo import reward_fn_char_count, reward_fn_sentiment
from solutions.ch3_grpo import group_advantages
from solutions.ch4_kl import KINDS, calc_estimator_stats, calc_exact_kl, calc_kl_estimate
from solutions.ch6_preferences import RewardModel, make_reward_fn, reward_fn_true
from solutions.ch8_inside import find_direction, only_adapters, steer, truncate_rank
from tests.course.helpers import ROOT
from tests.course.test_browser import needs_browser, open_browser
from utils.authoring.book.pages import WIDGET
from utils.authoring.book.weights import write_weights
from utils.models.corpus import (
    NEGATIVE_WORDS,
    POSITIVE_WORDS,
    addition_prompt,
    held_out_pairs,
    review_prompts,
)
from utils.models.loading import EMBEDDED_MODEL, load_base_model

pytestmark = [pytest.mark.takes_long, needs_browser]
BOOK = ROOT / "dist" / "book"
STATIC = ROOT / "utils" / "authoring" / "book" / "static"
PROMPTS = [addition_prompt(a, b) for a, b in held_out_pairs()[:10]] + review_prompts()[1][:10]
SOURCES = (ROOT / "chapters" / "source").glob("*.md")
MARKERS = [marker for path in SOURCES for marker in WIDGET.findall(path.read_text())]
WIDGETS = sorted({"front", *(name for name, _ in MARKERS)})
REWARD_MODEL = "ch6_reward-model"
GRPO = "ch3_grpo-25"
PATIENCE_S = 240  # on a busy machine


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A page for each widget, beside what the book's build writes."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(STATIC, folder / "_static")
    write_weights(folder / "_static" / "play")
    head = "<!doctype html><meta charset='utf-8'><link rel='icon' href='data:,'>"
    script = "<script src='_static/play.js'></script>"
    for name in WIDGETS:
        html = f"{head}{script}<div data-play='{name}'></div>"
        (folder / f"{name}.html").write_text(html)
    return folder


@pytest.fixture(scope="module")
def browser():
    driver = open_browser("window-size=800,1200")
    driver.set_script_timeout(PATIENCE_S)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser, site):
    browser.get((site / "front.html").as_uri())
    wait_until_done(browser)
    return browser


def wait_for(driver, script: str):
    """Return what the page's expression is, once it's true."""
    return WebDriverWait(driver, PATIENCE_S, 0.05).until(
        lambda driver: driver.execute_script(f"return {script}")
    )


def wait_until_done(driver) -> None:
    """Wait until the page's widget has shown all that it was asked for."""
    figure = "document.querySelector('[data-play]:not([aria-busy]) dd')?.textContent"
    wait_for(driver, f"!['–', undefined].includes({figure})")


def ask(page, job: str, **options):
    """Run a job of the worker for no widget; return its result and what it gave on the way."""
    script = """
        const [job, done] = arguments, element = document.createElement("i"), parts = [];
        element.dataset.play = "test";
        const keep = ({logits = [], ...part}) => parts.push({logits: [...logits], ...part});
        play.run(element, job, keep).then(result => done([result, parts]))
    """
    return page.execute_async_script(script, {"job": job, **options})


def get_logits(page, **policy) -> list[torch.Tensor]:
    """Return the page's logits at each token of each prompt."""
    found, _ = ask(page, "getLogits", prompts=PROMPTS, policy=policy)
    return [torch.tensor(rows) for rows in found]


@torch.no_grad()
def measure_difference(found: list[torch.Tensor], model) -> float:
    """Return the largest difference from PyTorch's logits."""
    worst = 0.0
    for prompt, logits in zip(PROMPTS, found, strict=True):
        ids, mask = encode_prompts(model, [prompt], 0, prepend_bos=True)
        worst = max(worst, (model(ids, attention_mask=mask)[0] - logits).abs().max().item())
    return worst


def load_rounded(name: str, strength: float = 1.0):
    """Return a policy in PyTorch whose frozen weights are rounded to float16, as the page's are."""
    model = load_policy(ADAPTERS / f"{name}.safetensors", strength)
    round_weights(model.base.original_model)
    return model


def round_weights(model) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.half())


@pytest.fixture(scope="module")
def grpo():
    """GRPO's last policy."""
    return load_rounded(GRPO)


# --- The engine -----------------------------------------------------------------------------------


def test_logits_of_the_base(page):
    model, found = load_base_model("embedded", "cpu"), get_logits(page)
    assert measure_difference(found, model) < 1e-2
    round_weights(model.original_model)
    assert measure_difference(found, model) < 1e-4


NAMES = sorted({path.stem for path in ADAPTERS.glob("*.safetensors")} - {REWARD_MODEL})


@pytest.mark.parametrize(
    ("name", "strength"),
    [*((name, 1.0) for name in NAMES), *((GRPO, strength) for strength in (0.0, 0.3, 0.75, 1.5))],
)
def test_logits_of_each_adapter(page, name, strength):
    found = get_logits(page, adapter=name, strength=strength)
    assert measure_difference(found, load_rounded(name, strength)) < 1e-4


SITES = ["blocks.0.attn.q", "blocks.1.mlp.in", "blocks.1.attn.v", "blocks.3.mlp.out"]
PARTS = {
    "some sites": ({"sites": SITES}, lambda model: only_adapters(model, SITES.__contains__)),
    "rank 1": ({"rank": 1}, lambda model: truncate_rank(model, 1)),
    "rank 3": ({"rank": 3}, lambda model: truncate_rank(model, 3)),
}


@pytest.mark.parametrize("part", PARTS)
def test_logits_with_a_part_of_an_adapter(page, grpo, part):
    given, take = PARTS[part]
    found = get_logits(page, adapter=GRPO, **given)
    with take(grpo):
        assert measure_difference(found, grpo) < 1e-4
    assert measure_difference(found, grpo) > 0.01


def test_logits_of_the_steered_base(page, grpo):
    prompt, prompts = PROMPTS[0], PROMPTS[1:6]
    wanted = {"adapter": GRPO, "prompts": prompts, "layer": 2, "scale": 1.5}
    _, (first,) = ask(page, "sample", prompt=prompt, steer=wanted)
    found = torch.tensor(first["logits"])
    name = "blocks.2.hook_out"
    ids, mask = encode_prompts(grpo, prompts, 0, prepend_bos=True)
    direction = find_direction(grpo, ids, name, mask)
    ids, mask = encode_prompts(grpo, [prompt], 0, prepend_bos=True)
    with torch.no_grad(), steer(grpo, name, direction, 1.5):
        assert (grpo(ids, attention_mask=mask)[0, -1] - found).abs().max() < 1e-3


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


def test_rewards_of_reviews(page):
    texts = ["", " great.Great, a BAD ending. 3 warm scenes!", " greatly... Welightful. cold cold"]
    script = """
        const words = {positive: arguments[1], negative: arguments[2]};
        return arguments[0].map(text =>
            [calcSentiment(text, words), calcTrueReward(text, words), countStops(text)])
    """
    found = torch.tensor(page.execute_script(script, texts, POSITIVE_WORDS, NEGATIVE_WORDS))
    expected = [fn(texts) for fn in (reward_fn_sentiment, reward_fn_true, reward_fn_char_count)]
    torch.testing.assert_close(found.T, torch.stack(expected))


@pytest.mark.parametrize("policy", [None, "ch6_over-60"])
def test_the_reward_model(page, policy):
    prompt = PROMPTS[-1]
    wanted = {"count": 8, "judge": REWARD_MODEL, "policy": {"adapter": policy}}
    _, (_, *samples) = ask(page, "sample", prompt=prompt, **wanted)
    model = load_policy(ADAPTERS / f"{REWARD_MODEL}.safetensors", model_class=RewardModel)
    round_weights(model.base.original_model)
    texts, found = zip(*((sample["text"], sample["reward"]) for sample in samples), strict=True)
    rewards = make_reward_fn(model)([*texts], [prompt] * len(texts))
    torch.testing.assert_close(torch.tensor(found), rewards, atol=1e-4, rtol=0)


# --- The widgets ----------------------------------------------------------------------------------


@pytest.fixture
def show(browser, site):
    """Open a widget on a page of its own, or on the book's first page."""

    def show(name: str, address: Path | None = None) -> Widget:
        browser.get((address or site / f"{name}.html").as_uri())
        return Widget(browser)

    yield show
    assert browser.get_log("browser") == []
    fetched = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    for name in browser.execute_script(fetched):
        assert name.startswith(("file:", "data:", "blob:"))


class Widget:
    """What a person does with it, and what it says then."""

    def __init__(self, driver):
        self.driver = driver
        wait_until_done(driver)
        self.root = driver.find_element("css selector", "[data-play]")

    def find(self, selector: str) -> list:
        return self.root.find_elements("css selector", selector)

    def move(self, slider: int, key: str, times: int = 1) -> str:
        """Press a key on a slider, and return what it then says."""
        field = self.find("input[type=range]")[slider]
        field.send_keys(*[key] * times)
        return field.get_attribute("aria-valuetext")

    def press(self, text: str) -> None:
        next(button for button in self.find("button") if button.text == text).click()

    def set_numbers(self, *numbers: int) -> None:
        for field, number in zip(self.find("input[type=number]"), numbers, strict=True):
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(str(number))

    def read(self, figure: str) -> str:
        wait_until_done(self.driver)
        return self.find(f"[data-figure={figure}]")[0].text

    def measure(self, figure: str) -> float:
        return float(self.read(figure).replace("−", "-"))

    def count(self, figure: str) -> int:
        return int(self.read(figure).split()[0])

    def count_right(self, pairs: list[tuple[int, int]]) -> int:
        """Return how many answers to these sums are right, twelve to each."""
        found = 0
        for pair in pairs:
            self.set_numbers(*pair)
            right = self.count("right")
            assert [mark.text for mark in self.find(".play-answers b")].count("✓") == right
            found += right
        return found


def test_every_marker_names_a_widget_and_asks_a_question(page):
    assert all(question.endswith("?") for _, question in MARKERS)
    assert page.execute_script("return Object.keys(WIDGETS).sort()") == WIDGETS


def test_widgets_of_one_page_leave_each_other_alone(browser, site):
    marks = "".join(
        f"<div data-play='{name}'></div>" for name in ("front", "front", "ch0-sampling")
    )
    head = "<meta charset='utf-8'><script src='_static/play.js'></script>"
    (site / "several.html").write_text(head + marks)
    browser.get((site / "several.html").as_uri())
    move = """(() => {
        const sliders = [...document.querySelectorAll("input[type=range]")];
        sliders.forEach(slider => slider.dispatchEvent(new Event("input")));
        return sliders.length === 5
    })()"""
    wait_for(browser, move)
    browser.execute_script(move)  # before a model has said anything
    first = "[...document.querySelectorAll('[data-play]:not([aria-busy]) dl')]"
    first += ".map(list => list.querySelector('dd').textContent)"
    wait_for(browser, f"{first}.filter(text => text !== '–').length === 3")
    found = browser.execute_script(f"return {first}")
    assert found[0] == found[1]
    assert browser.get_log("browser") == []


def test_what_did_not_load_is_tried_again(browser, site):
    weights, away = site / "_static" / "play", site / "away.js"

    def read_note(name: str):
        """Return the note's button, once the file that is missing is back."""
        button = wait_for(browser, "document.querySelector('.play-failure button')")
        note = button.find_element("xpath", "..")
        assert note.text == f"This didn’t work: {name}.js couldn’t be loaded. Try again"
        away.rename(weights / f"{name}.js")
        return button

    for name in ("widgets", "base"):
        (weights / f"{name}.js").rename(away)
        browser.get((site / "ch3-phases.html").as_uri())
        read_note(name).click()
        widget = Widget(browser)
    (weights / "ch3_grpo-1.js").rename(away)
    widget.move(0, Keys.ARROW_RIGHT)
    read_note("ch3_grpo-1").click()
    assert widget.count("worked") <= 8
    assert widget.find(".play-failure") == []
    browser.get_log("browser")  # says what was missing


def test_more_training_more_right_answers(show):
    widget, pairs = show("front"), held_out_pairs()[:6]  # 72 answers
    before = widget.count_right(pairs)
    assert widget.count("worked") < 8
    assert widget.move(0, Keys.ARROW_RIGHT, 20) == "1.00"
    after = widget.count_right(pairs)
    assert widget.count("worked") > 8
    assert before <= 0.6 * 72
    assert after >= 0.8 * 72
    assert widget.find("[aria-live]")[0].get_attribute("textContent").startswith("right: ")


@pytest.mark.parametrize("address", [None, BOOK / "index.html"], ids=["page", "book"])
def test_numbers_that_the_model_does_not_know(show, address):
    if address and not (BOOK / "_static" / "play").exists():
        pytest.skip("needs `make book`")
    widget = show("front", address)
    widget.set_numbers(5, 20)
    (warning,), numbers = widget.find("[role=alert]"), widget.find("input[type=number]")
    assert "10 to 99" in warning.text
    assert [number.get_attribute("aria-invalid") for number in numbers] == ["true", "false"]
    widget.set_numbers(50, 20)
    assert warning.text == ""
    assert widget.count("right") >= 0


def test_how_many_tokens_a_setting_keeps(show):
    widget = show("ch0-sampling")
    assert widget.read("kept") == "512 of 512"
    assert widget.move(1, Keys.HOME) == "1"
    assert widget.move(1, Keys.ARROW_RIGHT, 4) == "5"
    assert widget.read("kept") == "5 of 512"
    assert 40 < float(widget.read("mass").rstrip("%")) < 60  # half of it, as chapter 0 says
    widget.move(0, Keys.HOME)
    assert widget.read("kept") == "1 of 512"


def test_the_strength_of_an_adapter_of_friendly_reviews(show):
    widget = show("ch1-adapter")
    assert widget.count("friendly") >= 6
    assert widget.move(0, Keys.HOME) == "-1.0"
    assert widget.count("friendly") <= 4


def test_the_mood_turns_and_its_words_pay_for_it(show):
    widget = show("ch2-mood")
    assert abs(widget.measure("mood")) < 0.8
    assert all(token.get_attribute("title") == "KL 0.00" for token in widget.find(".play-token"))
    assert widget.move(0, Keys.END) == "30 of 30"
    assert widget.measure("mood") >= 0.8
    tokens = [(token.get_attribute("title"), token.text) for token in widget.find(".play-token")]
    assert 0.5 < max(float(title.removeprefix("KL ")) for title, _ in tokens) < 10


def test_full_stops_with_a_kl_term_and_without(show):
    widget = show("ch2-stops")
    assert 1 < widget.measure("stops") < 5
    assert widget.move(0, Keys.END) == "30 of 30"
    assert widget.measure("stops") == 24
    assert {line.text for line in widget.find(".play-answers li")} == {"24" + "." * 24}
    widget.find("select")[1].send_keys(Keys.ARROW_DOWN)
    assert 5 < widget.measure("stops") < 10


def test_the_truth_falls_and_the_reward_model_does_not_see_it(show):
    widget = show("ch6-over")
    found = {0: (widget.measure("proxy"), widget.measure("truth"))}
    for phase, times in ((12, 3), (60, 3)):
        assert widget.move(0, Keys.ARROW_RIGHT, times) == f"{phase} of 60"
        found[phase] = widget.measure("proxy"), widget.measure("truth")
    assert found[0][0] < 0.6
    assert min(found[12][0], found[60][0]) > 1.2
    assert found[0][1] < 1.5 < 3 < found[12][1]
    assert found[60][1] < 1
    assert len(widget.find(".play-trace [data-series=truth]")) == 3


def test_a_small_beta_breaks_the_samples(show):
    widget = show("ch6-beta")
    assert widget.move(0, Keys.ARROW_RIGHT, 2) == "0.5"
    truth, kl = widget.measure("truth"), widget.measure("kl")
    assert truth > 1.5
    assert widget.move(0, Keys.END) == "0.05"
    assert widget.measure("truth") < truth
    assert widget.measure("kl") > 5 * kl


def test_a_group_shows_its_advantages(show):
    widget = show("ch3-phases")
    lines = widget.find(".play-answers li")
    rewards = torch.tensor([float("✓" in line.text) for line in lines])
    assert 0 < rewards.sum() < 8
    shown = [line.text.rpartition("A = ")[2].replace("−", "-") for line in lines]
    expected = group_advantages(rewards, 8)
    torch.testing.assert_close(torch.tensor([*map(float, shown)]), expected, atol=0.006, rtol=0)
    assert widget.move(0, Keys.END) == "25 of 25"
    assert widget.count("worked") >= 7


@pytest.mark.parametrize("is_older", [False, True])
def test_bias_and_spread_of_estimators(page, is_older):
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, reference = logits.softmax(-1)
    sampler = (policy + reference) / 2 if is_older else policy
    kl = calc_exact_kl(policy.log(), reference.log())
    for kind in KINDS:
        values = calc_kl_estimate(policy.log(), reference.log(), kind, sampler.log())
        bias = sampler @ values - kl
        std = (sampler @ (values - sampler @ values).square()).sqrt()
        if not is_older:
            expected = calc_estimator_stats(policy.log(), reference.log(), kind)
            torch.testing.assert_close((bias, std), expected)
        given = kind, policy.tolist(), reference.tolist(), sampler.tolist()
        found = page.execute_script("return calcKlStats(...arguments)", *given)
        assert found.pop("values") == pytest.approx(values.tolist())
        expected = {"kl": kl.item(), "bias": bias.item(), "std": std.item()}
        assert found == pytest.approx(expected, abs=1e-12)


def test_estimates_of_a_kl_that_is_drawn_by_hand(show, browser):
    widget = show("ch4-estimators")
    loaded = "return [...document.scripts].map((script) => script.src.split('/').pop())"
    assert "kl.js" in browser.execute_script(loaded)
    assert "base.js" not in browser.execute_script(loaded)

    def read(kind: str) -> list[float]:
        assert widget.read("count") == "1000 of 1000"
        cells = widget.find(f"[data-estimate={kind}] dd")
        return [float(cell.text.replace("−", "-")) for cell in cells]

    assert read("k3")[2] < 0.2 * read("k1")[2]  # near the reference
    widget.press("Far from it")
    assert widget.move(0, Keys.ARROW_LEFT, 5) == "56%"
    weights = [float(slider.get_attribute("value")) for slider in widget.find("[type=range]")]
    policy, reference = torch.tensor(weights).view(5, 2).T.log()
    kl = calc_exact_kl(policy, reference).item()
    for kind in KINDS:
        mean, *found = read(kind)
        bias, std = (number.item() for number in calc_estimator_stats(policy, reference, kind))
        assert found == pytest.approx([bias, std], abs=6e-4)
        assert abs(mean - kl - bias) < 4 * std / 1000**0.5
    assert read("k3")[2] > read("k1")[2]
    widget.find("[type=checkbox]")[0].click()
    assert abs(read("k1")[1]) > 0.1
    assert read("k4")[1] == 0


def test_one_adapter_is_enough(show):
    widget = show("ch8-sites")
    assert widget.count("worked") >= 10
    widget.press("All off")
    assert widget.count("worked") <= 6
    widget.press("Only block 3’s mlp.out")
    assert widget.count("worked") >= 10


def test_one_vector_is_enough(show):
    widget = show("ch8-direction")
    assert widget.count("worked") <= 6
    assert widget.move(0, Keys.ARROW_RIGHT, 4) == "1.00"
    assert widget.count("worked") >= 10
