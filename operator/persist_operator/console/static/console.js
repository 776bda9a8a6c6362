// Live: reloads the content of the page every few seconds while the box is checked. `/` moves to the filter. All else works without this file.
const box = document.getElementById("live"), old = document.getElementById("old");
let isLoading = false;
box.parentElement.hidden = false;
box.checked = sessionStorage.getItem("live") === "yes";
box.addEventListener("change", () => sessionStorage.setItem("live", box.checked ? "yes" : "no"));

async function reload() {
  const main = document.getElementById("main");
  const isBusy = main.contains(document.activeElement) && document.activeElement !== main;
  if (isLoading || !box.checked || document.hidden || isBusy || String(getSelection())) return;
  isLoading = true;
  try {
    // Of an answer that is no success, too, the page is what there is to see: the shard is gone, for example.
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html"), fresh = page.getElementById("main");
    const open = [...main.querySelectorAll("details")].map((one) => one.open);
    main.replaceChildren(...fresh.childNodes);
    main.querySelectorAll("details").forEach((one, index) => { one.open = open[index] ?? false; });
    document.title = page.title;
    old.hidden = true;
  } catch {
    old.hidden = false;
  } finally {
    isLoading = false;
  }
}
setInterval(reload, 5000);

document.addEventListener("keydown", (event) => {
  const filter = document.getElementById("filter");
  if (event.key !== "/" || !filter || /INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  filter.select();
});
