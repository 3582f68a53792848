// Requests to the server. Long work answers with a stream of events; aborting the request stops the work.

export class Problem extends Error {}

async function checked(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error;
  } catch {
    // No JSON: the status says what there is to say.
  }
  throw new Problem(message);
}

async function request(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error instanceof TypeError) throw new Problem("The server does not answer: was it stopped? Start it again, then reload.");
    throw error;
  }
}

const posted = (body, signal) => ({
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
});

export const get = async (path) => (await request(path)).json();
export const post = async (path, body) => (await request(path, posted(body))).json();
export const remove = async (path) => { await request(path, { method: "DELETE" }); };

// Post, and call `heard(name, data)` for every event. Returns the data of `done`, or null after an abort.
export async function stream(path, body, heard, signal) {
  let last = null;
  try {
    const response = await request(path, posted(body, signal));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (buffer + value).split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        const [, name, text] = event.match(/^event: (.*)\ndata: (.*)$/s);
        const data = JSON.parse(text);
        if (name === "error") throw new Problem(data.error);
        if (name === "done") last = data;
        else heard(name, data);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") return null;
    if (error instanceof Problem) throw error;
    throw new Problem("The connection to the server broke: was it stopped?");
  }
  return last;
}
