"""budget 页上的计算器：与 budget.py 逐字相同，键盘能用，手机上放得下，不联网。"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.lab.devices import DEVICES
from experiments.plan import number_text
from experiments.plan.memory import LEDGERS
from experiments.plan.planning import Request, make_plan
from experiments.plan.report import COMPARED, answer

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
if str(BOOK) not in sys.path:
    sys.path.insert(0, str(BOOK))

from figures.calculator import SCRIPT, calculator_html, devices_json  # noqa: E402

COMPARE = """
const wrong = [];
for (const [input, expected] of cases) {
  const got = api.answer(input, devices);
  const bars = got.bars.map((bar) => [bar.name, bar.total, bar.parts, bar.fits]);
  const same = got.impossible ? { impossible: got.impossible, bars } : { report: got.report, bars };
  if (JSON.stringify(same) !== JSON.stringify(expected)) wrong.push([input, same, expected]);
}
"""


def cases(count: int, seed: int) -> list[tuple[dict, dict]]:
    """随机输入与 budget.py 的回答；输入覆盖全部设备、可行的与不可行的计划。"""
    draw = random.Random(seed)
    pairs = []
    for index in range(count):
        r = {
            "params": float(f"{10 ** draw.uniform(7, 12):.{draw.randint(1, 9)}g}"),
            "device": list(DEVICES)[index % len(DEVICES)],
            "gpus": draw.choice([1, 2, 3, 4, 6, 8, 16, 24, 64, 100, 512, 4096, 65536]),
            "mfu": draw.randint(1, 100) / 100, "tokensPerParam": draw.choice([20, 1, 5.5, 2000]),
            "seqLen": draw.choice([512, 1024, 2048, 4096, 8192, 32768]),
            "price": draw.choice([None, 0, 2.5, 1.99]), "eager": draw.random() < 0.3,
            "memoryGb": draw.choice([None, None, 40, 96]),
        }
        request = Request(
            r["params"], r["device"], r["gpus"], r["mfu"], r["tokensPerParam"], r["seqLen"],
            memory_gb=r["memoryGb"], price_per_hour=r["price"],
            execution="eager" if r["eager"] else "compiled",
        )
        pairs.append((r, answer(request)))
    return pairs


PAGE = (BOOK / "budget.md").read_text(encoding="utf-8")


def test_the_spoken_plan_has_five_steps_with_the_right_numbers():
    """「怎么讲清楚」里的五步齐全，算力、小时、状态、batch 都是 1B、8 张 H100 的计划给出的数。"""
    spoken = PAGE.split("(budget-explain)=")[1].split("(budget-exercises)=")[0]
    assert all(f"**{n}，" in spoken for n in "一二三四五"), spoken
    plan = make_plan(Request(1e9))
    assert f"{plan.flops / 1e20:.1f}" == "1.2" and "1.2\\times10^{20}" in spoken
    assert f"约 {plan.cost.hours:.1f} 小时" in spoken and "16 GB" in spoken
    assert f"{plan.memory.states:.0f}" == "16" and "两百万 token" in spoken
    assert plan.global_batch == 2_097_152 and plan.strategy == "ddp"


def test_the_page_says_what_its_numbers_rest_on():
    """两本 16 字节的账都写明；放法的条数与计算器相同；MFU 的分母与不写配置的计划都说了。"""
    assert all(" + ".join(map(str, ledger)) in PAGE for ledger in LEDGERS.values())
    assert len(COMPARED) == 4 and "下面四条" in PAGE and "各四条横条" in PAGE
    assert "不论 `--dtype` 是什么，分母都是 bf16 的峰值" in PAGE and "**不写配置**" in PAGE
    for chapter in ("fsdp", "tensor_parallel", "pipeline_parallel", "mesh"):
        assert f"<{chapter}>`" in PAGE, chapter


def test_the_meter_divides_by_the_bf16_peak_whatever_the_dtype():
    """日志里 MFU 的分母只由设备表与 --peak-flops 定，与 --dtype 无关，选项的说明里写着。"""
    import inspect

    from experiments.loop import log, options

    assert "dtype" not in inspect.getsource(log.Meter)
    assert "稠密 bf16，与 dtype 无关" in inspect.getsource(options.Options)


def in_node(script: str) -> str:
    """在 Node 里运行一段脚本；没有 Node 时跳过（浏览器里的测试照样在）。"""
    if not (node := shutil.which("node")):
        pytest.skip("没有 node")
    done = subprocess.run(
        [node, "-"], input=f"const api = require({json.dumps(str(SCRIPT))});\n{script}",
        text=True, capture_output=True, encoding="utf-8", timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calculator_equals_budget_in_node():
    """计算器的 JavaScript 与 budget.py 对随机输入给出同样的文字，一位不差（不开浏览器）。"""
    pairs = cases(60, seed=1)
    wrong = in_node(
        f"const cases = {json.dumps(pairs)}, devices = {devices_json()};{COMPARE}"
        "console.log(JSON.stringify(wrong.slice(0, 2)));"
    )
    assert json.loads(wrong) == []
    impossible = sum("impossible" in expected for _, expected in pairs)
    assert 5 < impossible < 55, f"{impossible} 个不可行：输入没有覆盖两种情形"


def test_numbers_are_written_alike():
    """定点、分组、科学计数、读法、时长：两种语言写出同样的字，恰好一半时都进位。"""
    draw = random.Random(0)
    values = [0.125, 2.5, 0.5, 1.25e20, 9.996e15, 999.5, 99.95, 1e12, 0.0, 71.96, 0.999]
    values += [10 ** draw.uniform(-3, 20) for _ in range(400)]
    ours = [
        [
            number_text.fixed(v, 1), number_text.grouped(v, 2), number_text.readable(v),
            number_text.duration(v), number_text.scientific(v, 2) if v > 1e9 else "",
        ]
        for v in values
    ]
    theirs = json.loads(in_node(
        f"console.log(JSON.stringify({json.dumps(values)}.map((v) => [api.fixed(v, 1),"
        "api.grouped(v, 2), api.readable(v), api.duration(v), v > 1e9 ? api.scientific(v, 2)"
        " : ''])));"
    ))
    assert theirs == ours


@pytest.fixture(scope="module")
def browser(browser, tmp_path_factory):
    """打开了计算器的浏览器。"""
    page = tmp_path_factory.mktemp("calculator") / "calculator.html"
    page.write_text(
        "<!doctype html><html lang=zh><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<link rel=icon href='data:,'><body>{calculator_html()}",
        encoding="utf-8",
    )
    browser.get(page.as_uri())
    return browser


@pytest.mark.slow
@pytest.mark.browser
def test_calculator_equals_budget_in_chromium(browser):
    """无头 Chromium 里，计算器对 200 组随机输入的每一行都与 budget.py 相同，到最后一位。"""
    pairs = cases(200, seed=2)
    wrong = browser.execute_script(
        "const api = BudgetCalculator, devices = api.devices;"
        f"const cases = JSON.parse(arguments[0]); {COMPARE} return wrong.slice(0, 2);",
        json.dumps(pairs),  # WebDriver 会改动对象里键的次序，所以传文本
    )
    assert wrong == []


CONTRAST = """
document.documentElement.dataset.theme = arguments[0];
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (e) => {
  while (e && /rgba\\(.*, 0\\)|transparent/.test(getComputedStyle(e).backgroundColor))
    e = e.parentElement;
  return e ? getComputedStyle(e).backgroundColor : "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("form.budget, input[type=text], select, dd, .total")]
  .map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [e.dataset.field || e.className || e.tagName, (a + 0.05) / (b + 0.05)];
  });
"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_calculator_is_readable_in_both_themes(browser, theme):
    """深色与浅色下，每个输入框、每行文字与它的底色对比度都不小于 4.5（曾是深色压深色）。"""
    try:  # 主题给输出单元格的浅底深字，深色模式下也在
        browser.execute_script("document.body.style = 'color:#222832;background:#bbb'")
        found = browser.execute_script(CONTRAST, theme)
    finally:
        browser.execute_script("delete document.documentElement.dataset.theme")
        browser.execute_script("document.body.style = ''")
    assert len(found) > 10
    poor = {name: round(ratio, 1) for name, ratio in found if ratio < 4.5}
    assert not poor, poor


@pytest.mark.slow
@pytest.mark.browser
def test_keyboard_alone_changes_the_plan(browser):
    """只用键盘：Tab 到滑块，方向键改参数量，计划随之改变，并仍与 budget.py 相同。"""
    from selenium.webdriver.common.keys import Keys

    def shown() -> dict[str, str]:
        return browser.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('[data-report] dt')]"
            ".map((dt) => [dt.textContent, dt.nextElementSibling.textContent]));"
        )

    assert shown() == answer(Request(1.3e9))["report"]
    browser.find_element("tag name", "body").send_keys(Keys.TAB)
    slider = browser.switch_to.active_element
    assert slider.get_attribute("data-slider") == "params"
    slider.send_keys(Keys.ARROW_LEFT * 40)
    field = browser.find_element("css selector", "[data-field=params]")
    assert field.get_attribute("value") == "133 M"
    assert shown() == answer(Request(133e6))["report"]


@pytest.mark.slow
@pytest.mark.browser
def test_nonsense_is_named_and_the_old_plan_fades(browser):
    """填错时说出哪一格、要多少，旧的计划变灰；改对后恢复。"""
    from selenium.webdriver.common.keys import Keys

    field = browser.find_element("css selector", "[data-field=gpus]")
    message = browser.find_element("css selector", "[data-message]")
    field.clear()
    field.send_keys("-3")
    assert message.text.startswith("卡数要在 1 到 65536 之间"), message.text
    assert field.get_attribute("aria-invalid") == "true"
    field.send_keys(Keys.BACKSPACE * 2 + "8")
    assert message.text == "" and field.get_attribute("aria-invalid") == "false"


@pytest.mark.slow
@pytest.mark.browser
def test_calculator_fits_a_phone_and_stays_offline(browser):
    """375 像素宽时不横向滚动；控制台没有错误；每个输入都有名字；没有外部资源。"""
    size = {"width": 375, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        width = browser.execute_script("return document.documentElement.scrollWidth")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 375, width
    assert [log for log in browser.get_log("browser") if log["level"] == "SEVERE"] == []
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, select')]"
        ".filter((e) => !e.labels.length && !e.ariaLabel).length"
    )
    assert unnamed == 0
    assert "http" not in calculator_html().replace("http-equiv", "")
