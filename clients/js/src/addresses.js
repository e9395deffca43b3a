/** The base URLs of a plane's frontends, and the one that is used now. All requests of a client share them. */
export class Addresses {
  #urls;
  #index = 0;

  /**
   * `baseUrls`: with or without `/v1` at the end. Throws TypeError if there is none, or one is no HTTP URL: a request to
   * any other server is passed on without protection, so a URL that matches none must not be accepted.
   */
  constructor(baseUrls) {
    if (!baseUrls.length) throw new TypeError("at least one base URL is needed");
    if (typeof baseUrls === "string") throw new TypeError(`base URLs are a list, such as ["${baseUrls}"]`);
    this.#urls = baseUrls.map((url) => checked(url).replace(/\/+$/, "").replace(/(\/v1)?\/*$/, ""));
  }

  get count() {
    return this.#urls.length;
  }

  /** The base URL for the next request, without `/v1`. */
  get current() {
    return this.#urls[this.#index];
  }

  /** Use the next one. Ignored if another request has done so already. */
  leave(url) {
    if (url === this.current) this.#index = (this.#index + 1) % this.#urls.length;
  }

  /** The path and query of a request below its base URL; undefined if it goes to another server. */
  pathOf(url) {
    const base = this.#urls.find((one) => url.startsWith(`${one}/`));
    return base === undefined ? undefined : url.slice(base.length);
  }
}

function checked(given) {
  if (/^https?:/i.test(given)) return new URL(given).href;
  throw new TypeError(`"${given}" is no base URL, such as http://127.0.0.1:8000`);
}
