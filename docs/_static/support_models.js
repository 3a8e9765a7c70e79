// The families of CLASSES ([class, answer, why]): a name without its head and its fields. Typing filters them.
const family = name => name.replace(/(For[A-Z]|Model|LMHead|Encoder|\(|\.).*$/, "") || name;
const make = (tag, parent, text) => Object.assign(parent.appendChild(document.createElement(tag)), {textContent: text});

function show() {
  const words = document.getElementById("search").value.toLowerCase().split(/\s+/);
  const found = CLASSES.filter(row => words.every(word => row.join(" ").toLowerCase().includes(word)));
  const groups = new Map();
  for (const row of found) {
    const name = family(row[0]);
    groups.set(name, [...(groups.get(name) || []), row]);
  }
  const place = document.getElementById("families");
  place.replaceChildren();
  make("p", place, `${found.length} classes in ${groups.size} families`);
  for (const [name, rows] of groups) {
    const box = place.appendChild(document.createElement("details"));
    box.open = groups.size === 1;
    const count = answer => rows.filter(row => row[1] === answer).length;
    const counts = ["exact", "refused", "not set up"].filter(count).map(answer => `${count(answer)} ${answer}`);
    make("summary", box, `${name}: ${counts.join(", ")}`);
    const list = make("ul", box, "");
    for (const [title, answer, why] of rows) make("li", list, `${title}: ${answer}${why ? ". " + why : ""}`);
  }
}

document.getElementById("search").addEventListener("input", show);
show();
