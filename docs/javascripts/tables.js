// On a narrow screen a table becomes a list (site.css), where each cell says what it is.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const names = [...table.querySelectorAll("thead th")].map((each) => each.textContent);
    table.classList.toggle("many-columns", names.length > 3);
    for (const row of table.tBodies[0]?.rows ?? []) {
      [...row.cells].forEach((cell, index) => { cell.dataset.name = names[index] ?? ""; });
    }
  }
});
