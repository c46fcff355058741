// What the pages do beyond links and forms: keys, and looking again without losing one's place. Everything works without it.
"use strict";

const search = document.querySelector(".search input");
const keys = document.getElementById("keys");
const opener = document.querySelector("[data-open=keys]");
const typing = () => /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
const rows = () => [...document.querySelectorAll("main a[data-row]")];

let armed = 0; // when "g" was pressed

function step(by) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.key === "Escape" && typing()) document.activeElement.blur();
  if (typing() || keys.open) return;
  if (armed && Date.now() - armed < 1500) {
    armed = 0;
    const link = [...document.querySelectorAll("nav a[data-key]")].find((one) => one.dataset.key === event.key);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  armed = 0;
  const acts = {
    "/": () => { search.focus(); search.select(); },
    "g": () => { armed = Date.now(); },
    "?": () => keys.showModal(),
    "j": () => step(1),
    "k": () => step(-1),
    "n": () => document.querySelector(".pager a[rel=next]")?.click(),
    "p": () => document.querySelector(".pager a[rel=prev]")?.click(),
  };
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
});

if (opener) {
  opener.hidden = false;
  opener.addEventListener("click", () => keys.showModal());
}

document.querySelector("body > nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// A form that does something is sent once: a second press while the first is on its way would be a second act.
document.addEventListener("submit", (event) => {
  if (event.target.method !== "post") return;
  if (event.target.dataset.sent) { event.preventDefault(); return; }
  event.target.dataset.sent = "yes";
});
window.addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => delete form.dataset.sent));

// Live pages: the parts that may change are fetched anew and put in place; while the console is away the page stays, and says how old it is.
const stale = document.getElementById("stale");
let seconds = Number(document.body.dataset.live ?? 0);
let fresh = Date.now();

async function look() {
  if (document.hidden) return later();
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store", signal: AbortSignal.timeout(20000) });
    if (answer.redirected) return location.replace(answer.url); // what this page waited for is there
    if (answer.status >= 400 && answer.status < 500) return location.reload();
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    const parts = (page) => [...page.querySelectorAll("[data-part]")].map((part) => part.dataset.part).join();
    if (seconds && !found.body.dataset.live || parts(document) !== parts(found)) return location.reload(); // it came to its end
    for (const part of document.querySelectorAll("[data-part]")) {
      const other = found.querySelector(`[data-part="${part.dataset.part}"]`);
      const held = part.contains(document.activeElement) || part.querySelector("details[open]") || String(getSelection()).length > 0;
      if (other && !held) part.replaceChildren(...other.childNodes);
    }
    seconds = Number(found.body.dataset.live ?? 0);
    fresh = Date.now();
    stale.hidden = true;
  } catch (problem) {
    const age = Math.round((Date.now() - fresh) / 1000);
    stale.textContent = `The console did not answer. What you see is ${age} seconds old; it looks again by itself.`;
    stale.hidden = false;
  }
  later();
}

function later() {
  if (seconds) setTimeout(look, seconds * 1000);
}

later();
