// A list of requests that stays as it is at the gateway: pages of it, merged with what has changed since.
import {get} from "./api.js";

const POLL_MS = 1000;
const REFRESH_MS = 10_000;
const PAGE = 100;
export const MOST_ROWS = 10_000;
const MOST_CALLS = 20;

/** Newest first, as the gateway sorts them. */
const ORDER = ["created_at", "request_id", "tenant"];
function before(a, b) {
  const other = ORDER.find((name) => a[name] !== b[name]);
  return other !== undefined && a[other] > b[other];
}
const own = (row) => row.request_id;
/** In a list of all tenants. */
export const ofAll = (row) => `${row.tenant}/${row.request_id}`;

export class LiveList {
  /** `path` with its filters; `changed` is called when `rows`, `more` or `error` have changed; `id` names a row as the route does. */
  constructor(path, changed, id = own) {
    this.path = path + (path.includes("?") ? "&" : "?");
    this.id = id;
    this.changed = changed;
    this.rows = [];
    this.known = new Map();
    this.more = false;
    this.error = null;
    this.loaded = false;
    this.live = true;
    /** The first row that is looked at: those behind it are read again now and then, for what no change tells. */
    this.top = 0;
    this.cursor = null;
    this.ended = false;
    this.refreshed_at = Date.now();
    this.busy = false;
  }

  /** Ask again and again while the page is looked at, until `end`. */
  start() {
    const seen = () => document.hidden || this.again();
    document.addEventListener("visibilitychange", seen);
    this.timer = setInterval(seen, POLL_MS);
    this.end = () => { this.ended = true; clearInterval(this.timer); document.removeEventListener("visibilitychange", seen); };
    this.again();
    return this.end;
  }

  async again() {
    if (!this.live && this.loaded && !this.error) return;
    await this.alone(async () => {
      if (this.cursor === null) await this.read();
      else await this.merge();
      if (Date.now() - this.refreshed_at >= REFRESH_MS) await this.refresh();
    });
  }

  /** The next page behind the rows that are here. */
  async next() {
    if (this.more && this.rows.length < MOST_ROWS) await this.alone(() => this.page(this.rows.length ? this.id(this.rows.at(-1)) : undefined));
  }

  /** One call after another: what an older answer says never comes over a newer one. */
  async alone(work) {
    if (this.busy || this.ended) return;
    this.busy = true;
    try {
      await work();
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.busy = false;
    if (!this.ended) this.changed();
  }

  /** From the beginning; of what is behind the pages that are read, the rows that were here stay. */
  async read() {
    const wanted = Math.max(PAGE, Math.min(this.rows.length, 5 * PAGE));
    const {cursor, rows, more} = await this.pages(wanted);
    const last = rows.at(-1);
    this.rows = more ? [...rows, ...this.rows.filter((row) => before(last, row))].slice(0, MOST_ROWS) : rows;
    this.known = new Map(this.rows.map((row) => [this.id(row), row]));
    Object.assign(this, {cursor, more, loaded: true, refreshed_at: Date.now()});
  }

  async pages(wanted) {
    const first = await get(`${this.path}limit=${PAGE}`);
    const rows = [...first.data];
    let more = first.has_more, last = first.last_id;
    while (more && rows.length < wanted) {
      const next = await get(`${this.path}limit=${PAGE}&after=${encodeURIComponent(last)}`);
      rows.push(...next.data);
      [more, last] = [next.has_more, next.last_id];
    }
    return {cursor: first.cursor, rows, more};
  }

  async page(after) {
    const found = await get(`${this.path}limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
    found.data.forEach((row) => this.put(row, true));
    this.more = found.has_more;
  }

  /** What no change tells: that a worker has gone for which requests wait, that a request has come of age, and which rows left before a reset. */
  async refresh() {
    this.refreshed_at = Date.now();
    const {top} = this, after = top > 0 && this.rows[top - 1] && this.id(this.rows[top - 1]);
    const found = await get(`${this.path}limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
    const there = new Set(found.data.map(this.id));
    const end = found.has_more ? this.place(found.data.at(-1)) : this.rows.length;
    if (after) this.rows.slice(top, end).map(this.id).filter((id) => !there.has(id)).forEach((id) => this.drop(id));
    found.data.forEach((row) => this.put(row));
  }

  async merge() {
    for (let calls = 0; calls < MOST_CALLS; calls++) {
      const found = await get(`${this.path}limit=${PAGE}&changed_since=${encodeURIComponent(this.cursor)}`);
      if (found.reset) return this.read();
      this.cursor = found.cursor;
      found.left.forEach((id) => this.drop(id));
      found.data.forEach((row) => this.put(row));
      if (!found.has_more) return;
    }
  }

  /** Take in a row. One that is behind the last row belongs to a page that is not here yet, unless it is `behind` by right. */
  put(row, behind = false) {
    const id = this.id(row), here = this.known.get(id);
    if (here && here.created_at === row.created_at) {
      this.rows[this.place(row)] = row;
    } else {
      if (here) this.drop(id);
      const at = this.place(row);
      if (at === this.rows.length && this.more && !behind) return;
      this.rows.splice(at, 0, row);
      if (this.rows.length > MOST_ROWS) {
        const gone = this.rows.pop();
        this.known.delete(this.id(gone));
        this.more = true;
        if (gone === row) return;
      }
    }
    this.known.set(id, row);
  }

  drop(id) {
    const row = this.known.get(id);
    if (!row) return;
    this.known.delete(id);
    this.rows.splice(this.place(row), 1);
  }

  /** Where a row is, or would be. */
  place(row) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (before(this.rows[middle], row)) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}
