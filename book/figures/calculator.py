"""预算计算器：把设备表、页面片段与 `calculator.js` 拼成一段可以直接放进书页的 HTML。

设备表由 `experiments/lab/devices.py` 当场写出，所以网页与命令行永远用同一份。
"""

import json
from dataclasses import asdict
from pathlib import Path

from experiments.lab.devices import DEVICES, PRICE_DATE

SCRIPT = Path(__file__).with_name("calculator.js")

STYLE = """
.budget{--ink:#1f2937;--paper:#fff;--field:#f9fafb;color:var(--ink);background:var(--paper);
  border:1px solid #9ca3af;border-radius:8px;padding:1rem;margin:1rem 0;max-width:100%;
  box-sizing:border-box;color-scheme:light}
html[data-theme=dark] .budget{--ink:#e5e7eb;--paper:#14181e;--field:#29313d;color-scheme:dark}
.budget .inputs{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,15rem),1fr));
  gap:.8rem 1.4rem;border:0;margin:0;padding:0;min-width:0}
.budget label{display:flex;flex-direction:column;gap:.2rem;font-size:.92rem;min-width:0}
.budget label.check{flex-direction:row;align-items:center;gap:.5rem}
.budget .pair{display:flex;gap:.6rem;align-items:center}
.budget input[type=range]{flex:1;min-width:0;height:2rem;accent-color:#0063a3}
.budget input[type=text],.budget select,.budget option{color:var(--ink);
  background:var(--field)}
.budget input[type=text],.budget select{width:100%;min-width:0;padding:.35rem .5rem;font:inherit;
  border:1px solid #6b7280;
  border-radius:4px;box-sizing:border-box}
.budget .pair input[type=text]{width:6rem;flex:none}
.budget input[type=checkbox]{width:1.2rem;height:1.2rem;accent-color:#0063a3}
.budget input[aria-invalid=true]{border-color:#b91c1c;outline:2px solid #b91c1c}
.budget :focus-visible{outline:2px solid #0063a3;outline-offset:2px}
.budget [data-message]{color:#b91c1c;min-height:1.5em;margin:.6rem 0}
html[data-theme=dark] .budget [data-message]{color:#fca5a5}
.budget.stale [data-report],.budget.stale [data-bars]{opacity:.35}
.budget dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem .9rem;margin:0 0 1rem}
.budget dt{font-weight:600}.budget dd{margin:0;min-width:0;overflow-wrap:anywhere}
.budget .bar{display:grid;grid-template-columns:13rem 1fr 9rem;gap:.7rem;align-items:center;
  margin:.3rem 0;font-size:.9rem}
.budget .bar.best{font-weight:600}
.budget .track{position:relative;display:flex;height:1.3rem;min-width:0;
  background:var(--field);border:1px solid #9ca3af;overflow:hidden}
.budget .track i{display:block;height:100%;flex:none}
.budget .track b{position:absolute;top:0;bottom:0;width:3px;margin-left:-3px;background:#b91c1c}
.budget .states{background:#00734f}.budget .working{background:#56b4e9}
.budget .activations{background:#d98200}.budget .peak{background:#9c4479}
.budget .bar.over .track{opacity:.55}
.budget .key{display:flex;flex-wrap:wrap;gap:.3rem 1rem;font-size:.85rem;margin:.6rem 0 0}
.budget .key i{display:inline-block;width:.9em;height:.9em;margin-right:.35em;
  vertical-align:-.1em}
.budget .key i.line{width:3px;background:#b91c1c}
@media(max-width:640px){.budget{padding:.7rem}
  .budget .bar{grid-template-columns:1fr auto}.budget .track{grid-column:1/-1;grid-row:2}}
"""

BODY = """
<form class="budget" aria-label="训练预算计算器" onsubmit="return false">
<fieldset class="inputs">
<label>参数量<span class="pair">
<input type="range" data-slider="params" min="0" max="200" value="85" aria-label="参数量滑块">
<input type="text" data-field="params" value="1.3 B" aria-label="参数量"></span></label>
<label>卡数<span class="pair">
<input type="range" data-slider="gpus" min="0" max="12" value="3" aria-label="卡数滑块">
<input type="text" data-field="gpus" value="8" inputmode="numeric" aria-label="卡数"></span></label>
<label>MFU（%）<span class="pair">
<input type="range" data-slider="mfu" min="5" max="65" value="40" aria-label="MFU 滑块">
<input type="text" data-field="mfu" value="40" inputmode="decimal" aria-label="MFU"></span></label>
<label>设备<select data-field="device" aria-label="设备"></select></label>
<label>每个参数的 token 数<input type="text" data-field="tokens" value="20"
 inputmode="decimal" aria-label="每个参数的 token 数">
</label>
<label>序列长度（token）<select data-field="seq_len" aria-label="序列长度">
<option>512</option><option>1024</option><option selected>2048</option><option>4096</option>
<option>8192</option><option>32768</option></select></label>
<label>单价（美元/卡时，空着用参考价）
<input type="text" data-field="price" inputmode="decimal" aria-label="单价"></label>
<label class="check"><input type="checkbox" data-field="compile" checked>用 torch.compile</label>
</fieldset>
<p data-message role="status" aria-live="polite"></p>
<dl data-report></dl>
<div data-bars role="group" aria-label="每卡显存"></div>
<p class="key"><span><i class="states"></i>状态</span><span><i class="working"></i>权重副本</span>
<span><i class="activations"></i>激活</span><span><i class="peak"></i>logits 等</span>
<span><i class="line"></i>每卡显存（计划只用到它的九成）</span></p>
<noscript>这个计算器要 JavaScript；下面的表和图不要。</noscript>
</form>
"""


def devices_json() -> str:
    """设备表，`calculator.js` 要的样子。"""
    return json.dumps({name: asdict(device) for name, device in DEVICES.items()})


def calculator_html() -> str:
    """整段 HTML：样式、表单、设备表与脚本。"""
    script = SCRIPT.read_text(encoding="utf-8")
    return (
        f"<style>{STYLE}</style>{BODY}<script>{script}\n"
        f"BudgetCalculator.devices = {devices_json()};\n"
        "BudgetCalculator.start(document.querySelector('form.budget'), "
        f"BudgetCalculator.devices);</script>\n<!-- 参考租价的时点：{PRICE_DATE} -->"
    )
