const BORDER = /\r\n\r\n|\n\n|\r\r/;
const decoder = new TextDecoder();
const encoder = new TextEncoder();

export const encode = (text) => encoder.encode(text);
export const decode = (bytes) => decoder.decode(bytes);

/** The event that this text is: `raw`, with the empty line at its end, and its fields. No `data`: it has no such line. */
export function parseEvent(raw) {
  const event = { raw, name: "", id: undefined, data: undefined };
  for (const line of raw.split(/\r\n|\n|\r/)) {
    const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (field === "data") event.data = event.data === undefined ? value : `${event.data}\n${value}`;
    else if (field === "id") event.id = value;
    else if (field === "event") event.name = value;
  }
  return event;
}

/** Collects bytes until an event is complete. */
export class EventCutter {
  #decoder = new TextDecoder();
  #pending = "";

  /** The events that are complete with these bytes. */
  feed(bytes) {
    this.#pending += this.#decoder.decode(bytes, { stream: true });
    const events = [];
    for (let border; (border = BORDER.exec(this.#pending)); ) {
      const end = border.index + border[0].length;
      events.push(parseEvent(this.#pending.slice(0, end)));
      this.#pending = this.#pending.slice(end);
    }
    return events;
  }

  /** The text of an event that is not complete. */
  rest() {
    const rest = this.#pending;
    this.#pending = "";
    return rest;
  }
}

/** The JSON object in this text; an empty one if it is something else. */
export function jsonObject(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
  } catch {
    return {};
  }
}

/** The fields of OpenAI's error envelope in this text; none if it is something else. */
export function errorOf(text) {
  const { error } = jsonObject(text);
  return error !== null && typeof error === "object" ? error : {};
}
