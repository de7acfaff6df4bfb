// 预算计算器。算法与 experiments/plan/planning.py、memory.py 逐行对应，文字与 plan_report.py 相同；
// tests/test_budget_page.py 用几百组随机输入逐字比较。没有依赖，离线可用；Node 里也能 require。
(function (root) {
  "use strict";

  const GB = 1e9, USABLE = 0.9, ENOUGH_TOKENS = 4096, MAX_MICRO_BATCH = 256, PUE = 1.1;
  const MFU_LOW = 0.30, MFU_HIGH = 0.50;
  const ATTEMPTS = [["ddp", false], ["zero3", false], ["ddp", true], ["zero3", true]];
  const COMPARED = [["ddp", false], ["zero3", false], ["ddp", true], ["zero3", true]];
  const NAMES = { ddp: "DDP", zero3: "FSDP（ZeRO-3）" };

  // ---- 数字写成文字（number_text.py）----
  const fixed = (value, digits) => value.toFixed(digits);
  function grouped(value, digits) {
    const [whole, fraction] = fixed(value, digits || 0).split(".");
    const text = whole.replace(/\B(?=(\d{3})+$)/g, ",");
    return fraction ? text + "." + fraction : text;
  }
  function scientific(value, digits) {
    const [mantissa, exponent] = value.toExponential(digits).split("e");
    const sign = exponent[0];
    return mantissa + "e" + sign + exponent.slice(1).padStart(2, "0");
  }
  function readable(count) {
    for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6]]) {
      if (count >= size) {
        const scaled = count / size;
        return fixed(scaled, scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2) + " " + unit;
      }
    }
    return grouped(count);
  }
  function duration(hours) {
    if (hours < 1) return fixed(hours * 60, 1) + " 分钟";
    if (hours < 72) return fixed(hours, 1) + " 小时";
    return grouped(hours, 1) + " 小时（" + grouped(hours / 24, 1) + " 天）";
  }

  // ---- 模型的算术（architecture.py）----
  function gpt(d, layers, heads, seqLen, vocab) {
    const mlp = Math.max(1, Math.floor(Math.floor((8 * d) / 3) / 32) * 32);
    const matrices = d * 3 * d + d * d + 2 * d * mlp + mlp * d;
    const layer = matrices + 2 * d;
    return {
      d, layers, heads, seqLen, vocab, mlp, layer,
      params: vocab * d + layers * layer + d,
      matmul: layers * matrices + vocab * d,
    };
  }
  const defaultVocab = (params) => (params < 8e7 ? 8192 : 50304);

  function chooseShape(params, seqLen) {
    const vocab = defaultVocab(params), widths = [];
    for (let d = 64; d < 1024; d += 64) widths.push(d);
    for (let d = 1024; d < 2048; d += 128) widths.push(d);
    for (let d = 2048; d < 4096; d += 512) widths.push(d);
    for (let d = 4096; d < 32769; d += 1024) widths.push(d);
    let best = null, bestScore = Infinity;
    for (const d of widths) {
      const heads = Math.floor(d / (d < 2048 ? 64 : 128));
      const layer = gpt(d, 1, heads, seqLen, vocab).layer;
      const layers = Math.floor((params - vocab * d - d) / layer + 0.5);
      if (layers < 1 || 16 * layers > d || d > 192 * layers) continue;
      const error = Math.abs((vocab * d + d + layers * layer) / params - 1);
      const wanted = Math.min(Math.max(d / 24, 64), 128);
      const score = error + 0.05 * Math.abs(d / layers / wanted - 1);
      if (score < bestScore) { best = [d, layers, heads]; bestScore = score; }
    }
    return best && gpt(best[0], best[1], best[2], seqLen, vocab);
  }

  // ---- 显存（memory.py）----
  const bytesPerParam = (strategy, gpus) =>
    strategy === "ddp" ? 16 : 4 / gpus + 4 / gpus + 8 / gpus;
  function layerBytes(a, eager) {
    const attention = 6 * a.d + 4 * a.d + 2 * a.d + 4 * a.heads + 2 * a.d;
    return eager
      ? 8 * a.d + 8 * a.d + 6 * a.d + attention + 8 * a.mlp
      : 8 * a.d + 4 * a.d + attention + 6 * a.mlp;
  }
  const headBytes = (a, eager) => (eager ? 10 * a.d + 12 * a.vocab : 6 * a.d + 4 * a.vocab);

  function replicatedPhases(a, tokens, layer, eager, checkpoint) {
    const embedding = a.vocab * a.d, copies = 2 * a.matmul, head = headBytes(a, eager) * tokens;
    const phases = [];
    if (!checkpoint) {
      phases.push([copies, layer * a.layers * tokens, head]);
    } else {
      const kept = 4 * a.d * a.layers * tokens;
      phases.push([2 * embedding, kept, head], [4 * embedding, kept, layer * tokens]);
      if (eager) phases.push([copies, kept, head - 2 * a.vocab * tokens]);
    }
    if (!eager) phases.push([4 * a.params + 2 * embedding, 0, 0]);
    return phases;
  }
  function shardedPhases(a, tokens, fullLayer, eager, checkpoint) {
    const embedding = a.vocab * a.d, block = a.layer, layer = fullLayer - 2 * a.d;
    const kept = checkpoint ? 2 * a.d * a.layers : layer * a.layers;
    const rest = checkpoint ? kept : layer * (a.layers - 1);
    return [
      [2 * embedding + 4 * block, kept * tokens, headBytes(a, eager) * tokens],
      [4 * embedding + 10 * block, rest * tokens, checkpoint ? layer * tokens : 0],
    ];
  }
  function estimate(a, micro, seqLen, strategy, gpus, eager, checkpoint) {
    const layer = layerBytes(a, eager), tokens = micro * seqLen;
    const phases = (strategy === "zero3" && gpus > 1 ? shardedPhases : replicatedPhases)(
      a, tokens, layer, eager, checkpoint);
    let best = phases[0];
    for (const p of phases) if (p[0] + p[1] + p[2] > best[0] + best[1] + best[2]) best = p;
    const states = (bytesPerParam(strategy, gpus) * a.params) / GB;
    const working = best[0] / GB, activations = best[1] / GB, peak = best[2] / GB;
    return { states, working, activations, peak, total: states + working + activations + peak };
  }

  // ---- 计划（planning.py）----
  const globalBatch = (r) => (r.params < 5e8 ? 2 ** 19 : r.params < 5e9 ? 2 ** 21 : 2 ** 22);

  function largestMicroBatch(r, a, capacity, strategy, checkpoint, gpus) {
    const share = Math.floor(globalBatch(r) / (r.seqLen * gpus));
    const most = Math.max(1, Math.min(MAX_MICRO_BATCH, share));
    let size = 0;
    for (let micro = 1; micro <= most; micro *= 2) {
      const memory = estimate(a, micro, r.seqLen, strategy, gpus, r.eager, checkpoint);
      if (memory.total > USABLE * capacity) break;
      size = micro;
    }
    return size;
  }
  function chooseStrategy(r, a, capacity, gpus) {
    const share = Math.floor(Math.floor(globalBatch(r) / gpus) / 2);
    const enough = Math.min(ENOUGH_TOKENS, Math.max(r.seqLen, share));
    let best = null;
    for (const [strategy, checkpoint] of ATTEMPTS) {
      if (strategy === "zero3" && gpus === 1) continue;
      const micro = largestMicroBatch(r, a, capacity, strategy, checkpoint, gpus);
      const found = { strategy, checkpoint, micro };
      if (micro * r.seqLen >= enough) return found;
      if (micro && (!best || micro > best.micro)) best = found;
    }
    return best;
  }
  const room = (device) => Math.max(...(device.memory_gb || [0]));
  const trainingHours = (flops, gpus, peak, mfu) => flops / (gpus * peak * mfu) / 3600;

  function impossible(r, device, capacity, a, devices) {
    const least = estimate(a, 1, r.seqLen, "zero3", r.gpus, r.eager, true).total;
    const ways = [];
    let gpus = 1;
    while (gpus <= r.gpus) gpus *= 2;
    while (gpus <= 65536 && !chooseStrategy(r, a, capacity, gpus)) gpus *= 2;
    if (gpus <= 65536) ways.push(`同样的卡用 ${gpus} 张`);
    const others = Object.entries(devices).sort((x, y) => room(x[1]) - room(y[1]));
    for (const [name, other] of others) {
      if (room(other) > capacity && chooseStrategy(r, a, room(other), r.gpus)) {
        ways.push(`换成 ${r.gpus} 张 ${name}（${fixed(room(other), 0)} GB）`);
        break;
      }
    }
    const smaller = largestModel(r, capacity);
    if (smaller) ways.push(`模型缩到约 ${readable(smaller)} 参数`);
    return `${readable(a.params)} 参数放不进 ${r.gpus} 张 ${device.name}：FSDP 加重算、` +
      `micro-batch 为 1 时每卡仍要 ${fixed(least, 1)} GB，` +
      `可用的只有 ${fixed(USABLE * capacity, 1)} GB；` +
      `最近的可行办法：${ways.join("；或") || "缩短序列或缩小词表"}。`;
  }
  function largestModel(r, capacity) {
    let params = r.params;
    while ((params *= 0.9) >= 1e7) {
      const smaller = { ...r, params };
      const a = chooseShape(params, r.seqLen);
      if (!a) return null;
      if (chooseStrategy(smaller, a, capacity, r.gpus)) return params;
    }
    return null;
  }

  // ---- 文字（plan_report.py）----
  const strategyName = (s, checkpoint) => NAMES[s] + (checkpoint ? "，激活重算" : "");
  const parts = (m) =>
    `状态 ${fixed(m.states, 1)}，权重副本 ${fixed(m.working, 1)}，` +
    `激活 ${fixed(m.activations, 1)}，logits 等 ${fixed(m.peak, 1)}`;

  function bars(r, a, capacity, micro) {
    return COMPARED.map(([strategy, checkpoint]) => {
      const memory = estimate(a, micro, r.seqLen, strategy, r.gpus, r.eager, checkpoint);
      return {
        name: strategyName(strategy, checkpoint), total: fixed(memory.total, 1),
        parts: parts(memory), fits: memory.total <= USABLE * capacity, memory,
      };
    });
  }

  // r：{params, device, memoryGb, gpus, mfu, tokensPerParam, seqLen, price, eager}；
  // memoryGb、price 可以是 null，意思与 planning.Request 相同；全局 batch 总是随规模取
  function answer(r, devices) {
    const device = devices[r.device], capacity = r.memoryGb || room(device);
    const a = chooseShape(r.params, r.seqLen);
    const chosen = chooseStrategy(r, a, capacity, r.gpus);
    if (!chosen) {
      return {
        impossible: impossible(r, device, capacity, a, devices), capacity,
        bars: bars(r, a, capacity, 1),
      };
    }
    const { strategy, checkpoint, micro } = chosen;
    const perPass = micro * r.seqLen * r.gpus;
    const accumulation = Math.max(1, Math.floor(globalBatch(r) / perPass + 0.5));
    const tokens = r.tokensPerParam * r.params, flops = 6 * r.params * tokens;
    const batch = accumulation * perPass;
    const hours = trainingHours(flops, r.gpus, device.peak_bf16, r.mfu);
    const gpuHours = hours * r.gpus;
    const price = r.price === null || r.price === undefined ? device.price_per_hour : r.price;
    const memory = estimate(a, micro, r.seqLen, strategy, r.gpus, r.eager, checkpoint);
    const attention = (6 * a.params + 12 * a.layers * a.d * r.seqLen) / (6 * a.params) - 1;
    const best = trainingHours(flops, r.gpus, device.peak_bf16, MFU_HIGH);
    const worst = trainingHours(flops, r.gpus, device.peak_bf16, MFU_LOW);
    const report = {
      模型: `${grouped(a.params)} 参数：d ${a.d}，${a.layers} 层，` +
        `${a.heads} 头，词表 ${a.vocab}，序列 ${r.seqLen}`,
      数据: `${readable(tokens)} token，C = 6ND = ${scientific(flops, 2)} FLOPs`,
      并行: strategyName(strategy, checkpoint),
      batch: `${micro} 条 × ${r.gpus} 张卡 × 累积 ${accumulation} 次 = ` +
        `${grouped(batch)} token/步，共 ${grouped(Math.ceil(tokens / batch))} 步` +
        (micro * accumulation > 1 || batch <= globalBatch(r) ? "" :
          `（这个规模常用 ${grouped(globalBatch(r))}；卡太多，每卡一条也有这么大）`),
      显存: `每卡 ${fixed(memory.total, 1)} / ${fixed(capacity, 0)} GB：${parts(memory)}`,
      时间: `${duration(hours)}（MFU ${fixed(100 * r.mfu, 0)} %）；` +
        `${fixed(100 * MFU_HIGH, 0)} % 到 ${fixed(100 * MFU_LOW, 0)} % 是` +
        ` ${duration(best)}到 ${duration(worst)}；` +
        `算上注意力再多 ${fixed(100 * attention, 1)} %`,
      卡时: grouped(gpuHours, 1),
      价格: price === null ? "没有参考价，请给出单价" : "$" + grouped(gpuHours * price),
      电: device.power_w === null ? "未知"
        : `${grouped((gpuHours * device.power_w * PUE) / 1000)} kWh（满功率、PUE 1.1）`,
    };
    return { report, capacity, bars: bars(r, a, capacity, micro), best: report.并行 };
  }

  // ---- 界面 ----
  const number = (text) => {
    const match = /^\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmbt]?)\s*$/i.exec(text.replace(/,/g, ""));
    const unit = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 };
    return match ? Number(match[1]) * unit[match[2].toLowerCase()] : NaN;
  };
  // 滑块的格子 ↔ 数值：参数量每格 1/40 个数量级，取三位有效数字；卡数每格翻倍
  const paramsAt = (tick) => Number((10 ** (7 + tick / 40)).toPrecision(3));
  const LIMITS = {
    params: [1e7, 1e12], gpus: [1, 65536], mfu: [1, 100], tokens: [0.1, 100000], price: [0, 10000],
  };

  function start(box, devices) {
    const get = (name) => box.querySelector(`[data-field="${name}"]`);
    const slide = (name) => box.querySelector(`[data-slider="${name}"]`);
    const select = get("device");
    for (const [name, device] of Object.entries(devices)) {
      for (const size of device.memory_gb) {
        select.add(new Option(`${device.name}，${size} GB`, `${name}|${size}`));
      }
    }
    select.value = "h100|80";
    const chosen = () => select.value.split("|");

    function showPrice() {
      const price = devices[chosen()[0]].price_per_hour;
      get("price").placeholder = price === null ? "请填" : price;
    }
    function read() {
      const r = {
        params: number(get("params").value),
        device: chosen()[0], memoryGb: Number(chosen()[1]),
        gpus: number(get("gpus").value), mfu: number(get("mfu").value),
        tokensPerParam: number(get("tokens").value), seqLen: Number(get("seq_len").value),
        price: get("price").value.trim() === "" ? null : number(get("price").value),
        eager: !get("compile").checked,
      };
      const given = {
        params: r.params, gpus: r.gpus, mfu: r.mfu, tokens: r.tokensPerParam, price: r.price,
      };
      let wrong = null;
      for (const [name, [low, high]] of Object.entries(LIMITS)) {
        const value = given[name];
        const bad = value !== null && !(value >= low && value <= high) ||
          (name === "gpus" && !Number.isInteger(value));
        get(name).setAttribute("aria-invalid", bad ? "true" : "false");
        if (bad && !wrong) {
          const label = get(name).getAttribute("aria-label");
          wrong = `${label}要在 ${low} 到 ${high} 之间` +
            `${name === "gpus" ? "，且是整数" : ""}。`;
        }
      }
      r.mfu /= 100;
      return { r, wrong };
    }
    function refresh() {
      const { r, wrong } = read(), message = box.querySelector("[data-message]");
      box.classList.toggle("stale", Boolean(wrong));
      if (wrong) { message.textContent = wrong; return; }
      const result = answer(r, devices);
      message.textContent = result.impossible || "";
      fill(box.querySelector("[data-report]"), result.report || {});
      draw(box.querySelector("[data-bars]"), result);
    }
    function link(name, toField, toTick) {
      slide(name).addEventListener("input", () => {
        get(name).value = toField(Number(slide(name).value));
        slide(name).setAttribute("aria-valuetext", get(name).value);
        refresh();
      });
      get(name).addEventListener("input", () => {
        const value = number(get(name).value);
        if (value > 0) slide(name).value = toTick(value);
        refresh();
      });
    }
    link("params", (t) => readable(paramsAt(t)), (v) => Math.round(40 * (Math.log10(v) - 7)));
    link("gpus", (t) => String(2 ** t), (v) => Math.round(Math.log2(v)));
    link("mfu", String, (v) => v);
    for (const name of ["device", "tokens", "seq_len", "price", "compile"]) {
      get(name).addEventListener("input", () => { showPrice(); refresh(); });
    }
    showPrice();
    refresh();
  }
  function fill(list, report) {
    list.replaceChildren();
    for (const [label, text] of Object.entries(report)) {
      const term = document.createElement("dt"), value = document.createElement("dd");
      term.textContent = label;
      value.textContent = text;
      list.append(term, value);
    }
  }
  function draw(chart, result) {
    const scale = Math.max(result.capacity, ...result.bars.map((b) => b.memory.total));
    const fraction = (gb) => (100 * gb) / scale;
    chart.replaceChildren();
    for (const bar of result.bars) {
      const row = document.createElement("div"), track = document.createElement("div");
      row.className = "bar" + (bar.fits ? "" : " over") + (bar.name === result.best ? " best" : "");
      const verdict = bar.fits ? "放得下" : "放不下";
      const chosen = bar.name === result.best;
      const name = document.createElement("span"), total = document.createElement("span");
      name.textContent = bar.name + (chosen ? " ✓" : "");
      name.className = "name";
      total.textContent = `${bar.total} GB，${chosen ? "选用" : verdict}`;
      total.className = "total";
      track.className = "track";
      track.setAttribute("role", "img");
      track.setAttribute("aria-label", `${bar.name}：${bar.parts}`);
      track.title = bar.parts;
      for (const part of ["states", "working", "activations", "peak"]) {
        const piece = document.createElement("i");
        piece.className = part;
        piece.style.width = fraction(bar.memory[part]) + "%";
        track.append(piece);
      }
      const line = document.createElement("b");
      line.style.left = fraction(result.capacity) + "%";
      track.append(line);
      row.append(name, track, total);
      chart.append(row);
    }
  }

  const api = { answer, number, paramsAt, start, fixed, grouped, scientific, readable, duration };
  if (typeof module !== "undefined" && module.exports) module.exports = api;
  else root.BudgetCalculator = api;
})(typeof window !== "undefined" ? window : globalThis);
