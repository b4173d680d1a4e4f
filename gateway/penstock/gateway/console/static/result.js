// What came of a request: text, calls of tools, images and their steps, vectors compared.
import {Table, count, html, times} from "./parts.js";
import {part} from "./api.js";
import {Calls, Standing} from "./asking.js";

const MOST_COMPARED = 12;
const SHOWN_CHARS = 30;

/** `texts`: what was embedded, if vectors are awaited. */
export function Result({of, texts, may, tell}) {
  const {result, preview} = of;
  return html`<div aria-live="polite"><p class="answer"><bdi>${of.text}</bdi></p><${Calls} calls=${of.calls} /></div>
    ${of.busy && preview && html`<img class="made" src=${preview.image.url} alt=${`Preview after step ${preview.step} of ${preview.steps}`} />`}
    ${result?.images && html`<div class="row">${result.images.map((one) => html`<${Image} one=${one} />`)}</div>`}
    ${result?.embeddings && html`<${Compared} vectors=${result.embeddings} texts=${texts ?? []} />`}
    ${result?.artifact && html`<p><a href=${result.artifact.url}>The output, ${count(result.artifact.size_bytes)} bytes</a></p>`}
    <${Standing} of=${of} may=${may} tell=${tell} />
    ${result?.usage && html`<p class="faint">${Object.entries(result.usage).filter(([, number]) => number).map(([name, number]) =>
      `${count(number)} ${name.replaceAll("_", " ")}`).join(", ")}</p>`}`;
}

function Image({one}) {
  const to = (task) => `#/playground/${task}?image=${part(one.artifact_id)}`;
  const told = [one.width && `${one.width} × ${one.height} pixels`, one.seed !== undefined && one.seed !== null && `seed ${one.seed}`].filter(Boolean).join(", ");
  return html`<figure><a href=${one.url}><img class="made" src=${one.url} alt=${`the image that was made, ${told}`} /></a>
    <figcaption class="faint">${told} · <a href=${to("image_editing")}>edit</a> · <a href=${to("image_to_text")}>describe</a> · <a href=${to("image_processing")}>process</a></figcaption></figure>`;
}

/** The cosine of each two vectors: 1 for the same direction. */
function Compared({vectors, texts}) {
  const some = vectors.slice(0, MOST_COMPARED);
  const name = (place) => html`<bdi>${texts[place]?.slice(0, SHOWN_CHARS) ?? `text ${place + 1}`}</bdi>`;
  const rows = some.map((one, place) => [name(place), ...some.map((other) => cosine(one, other).toFixed(3))]);
  return html`<p>${times(vectors.length, "vector")} of ${count(vectors[0].length)} dimensions.${
      vectors.length > some.length ? ` The first ${some.length} are compared.` : ""}</p>
    ${some.length > 1 && html`<${Table} name="Cosine of each two" columns=${["cosine", ...some.map((_, place) => name(place))]} rows=${rows} />`}`;
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((sum, value, place) => sum + value * b[place], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other) || 1);
}
