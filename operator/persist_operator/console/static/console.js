// Live: reloads the content of the page every few seconds while the box is checked. `/` moves to the filter. All else works without this file.
const box = document.getElementById("live");
box.parentElement.hidden = false;
box.checked = sessionStorage.getItem("live") === "yes";
box.addEventListener("change", () => sessionStorage.setItem("live", box.checked ? "yes" : "no"));

async function reload() {
  const main = document.getElementById("main");
  const isBusy = main.contains(document.activeElement) && document.activeElement !== main;
  if (!box.checked || document.hidden || isBusy || String(getSelection())) return;
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
  const open = [...main.querySelectorAll("details")].map((one) => one.open);
  if (!fresh) return;
  main.replaceChildren(...fresh.childNodes);
  main.querySelectorAll("details").forEach((one, index) => { one.open = open[index] ?? false; });
}
setInterval(() => reload().catch(() => {}), 5000);

document.addEventListener("keydown", (event) => {
  const filter = document.getElementById("filter");
  if (event.key !== "/" || !filter || /INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  filter.select();
});
