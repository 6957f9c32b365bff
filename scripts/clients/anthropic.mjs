// Anthropic's client for Node against a server: node anthropic.mjs ADDRESS KEY

import Anthropic from "@anthropic-ai/sdk";
import { ADDRESS, KEY, SCHEMA, need, refused, run } from "./checks.mjs";

const client = new Anthropic({ baseURL: ADDRESS, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Write a function." }];
const short = { model: "any", messages, max_tokens: 8 };
const tools = [{ name: "weather", description: "Tell the weather.", input_schema: SCHEMA }];

await run("anthropic", {
  async "message"() {
    const found = await client.messages.create({ ...short, system: "Be brief." });
    need(found.stop_reason === "max_tokens", `it ended with ${found.stop_reason}`);
    need(found.usage.output_tokens === 8, "its usage is wrong");
  },
  async "message as a stream"() {
    const streamed = await client.messages.stream({ ...short, temperature: 0 }).finalMessage();
    const whole = await client.messages.create({ ...short, temperature: 0 });
    need(streamed.content[0].text === whole.content[0].text, "it differs from the whole answer");
    need(streamed.usage.output_tokens === 8, "its usage is wrong");
  },
  async "message with reasoning"() {
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const found = await client.messages.create({ ...short, max_tokens: 2000, thinking });
    need(found.content.length >= 1, "it is empty");
  },
  async "message with tools, a round trip"() {
    const tool_choice = { type: "any", disable_parallel_tool_use: true };
    const given = { ...short, max_tokens: 80, tools, tool_choice };
    const first = await client.messages.stream(given).finalMessage();
    const use = first.content.find((block) => block.type === "tool_use");
    need(first.stop_reason === "tool_use", `it ended with ${first.stop_reason}`);
    need(typeof use.input.city === "string", "no city in the call");
    const result = { type: "tool_result", tool_use_id: use.id, content: "sunny" };
    const more = [
      ...messages,
      { role: "assistant", content: first.content },
      { role: "user", content: [result] },
    ];
    const second = await client.messages.create({ ...short, messages: more, tools });
    need(second.stop_reason !== null, "no second answer");
  },
  async "message with a schema"() {
    const output_config = { format: { type: "json_schema", schema: SCHEMA } };
    const found = await client.messages.create({ ...short, max_tokens: 60, output_config });
    need(typeof JSON.parse(found.content[0].text).city === "string", "it does not fit the schema");
  },
  async "message with a stop sequence"() {
    const given = { ...short, max_tokens: 40, temperature: 0 };
    const whole = (await client.messages.create(given)).content[0].text;
    const stop = whole.slice(4, 7);
    const cut = await client.messages.create({ ...given, stop_sequences: [stop] });
    need(cut.stop_reason === "stop_sequence" && cut.stop_sequence === stop, "it did not stop there");
  },
  async "count of tokens"() {
    const found = await client.messages.countTokens({ model: "any", messages, tools });
    need(found.input_tokens > 10, `${found.input_tokens} tokens`);
  },
  async "errors"() {
    const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "" } };
    const asked = { ...short, messages: [{ role: "user", content: [image] }] };
    const wrong = await refused(() => client.messages.create(asked), 400);
    need(wrong.error.error.type === "invalid_request_error", "its type is wrong");
    const long = { ...short, messages: [{ role: "user", content: "word ".repeat(200000) }] };
    const full = await refused(() => client.messages.create(long), 400);
    need(full.message.includes("prompt is too long"), full.message);
    const stranger = new Anthropic({ baseURL: ADDRESS, apiKey: "wrong", maxRetries: 0 });
    await refused(() => stranger.messages.create(short), 401);
  },
  async "a stream that the client leaves"() {
    const stream = await client.messages.create({ ...short, max_tokens: 4000, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
});
