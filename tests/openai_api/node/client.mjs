// The official Node client against the server at OPENAI_BASE_URL, as its README uses it.
// Prints one JSON object, which test_node_client.py looks at.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const found = {};

const models = [];
for await (const model of client.models.list()) models.push(model.id);
found.models = models;

const messages = [{ role: "user", content: "What is a KV cache?" }];
const asked = { model: models[0], messages, max_completion_tokens: 12, temperature: 0 };

const whole = await client.chat.completions.create(asked);
found.whole = whole.choices[0].message.content;
found.reason = whole.choices[0].finish_reason;
found.tokens = whole.usage.completion_tokens;
found.requestId = whole._request_id;

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
found.streamed = streamed;
found.streamedTokens = usage.completion_tokens;

const helper = client.chat.completions.stream({ ...asked, max_completion_tokens: 200 });
found.helper = await helper.finalContent();

const left = await client.chat.completions.create({ ...asked, max_completion_tokens: 1000, stream: true });
for await (const chunk of left) {
  if (chunk.choices[0]?.delta?.content) break;
}
found.left = left.controller.signal.aborted;

try {
  await client.chat.completions.create({ ...asked, temperature: -1 });
} catch (error) {
  found.error = { name: error.constructor.name, status: error.status, param: error.param };
}

console.log(JSON.stringify(found));
