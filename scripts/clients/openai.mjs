// OpenAI's client for Node against a server: node openai.mjs ADDRESS KEY

import OpenAI from "openai";
import { ADDRESS, KEY, SCHEMA, need, refused, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: KEY, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Write a function." }];
const short = { model, messages, max_tokens: 8 };
const FUNCTION = { name: "weather", description: "Tell the weather.", parameters: SCHEMA };
const tools = [{ type: "function", function: FUNCTION }];
const format = { type: "json_schema", json_schema: { name: "place", schema: SCHEMA, strict: true } };
const asked = { model, input: "Write a function.", max_output_tokens: 8 };
const responseTools = [{ type: "function", ...FUNCTION, strict: true }];
const responseFormat = { format: { type: "json_schema", name: "place", schema: SCHEMA } };

async function collected(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

await run("openai", {
  async "chat completion"() {
    const found = await client.chat.completions.create(short);
    need(found.choices[0].finish_reason === "length", "it did not end at the limit");
    need(found.usage.completion_tokens === 8, "its usage is wrong");
  },
  async "chat completion as a stream"() {
    const options = { stream: true, stream_options: { include_usage: true }, temperature: 0 };
    const chunks = await collected(await client.chat.completions.create({ ...short, ...options }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    const whole = await client.chat.completions.create({ ...short, temperature: 0 });
    need(text === (whole.choices[0].message.content ?? ""), "it differs from the whole answer");
    need(chunks.at(-1).usage.completion_tokens === 8, "there is no usage at its end");
  },
  async "chat completion with tools, a round trip"() {
    const forced = { tool_choice: "required", parallel_tool_calls: false };
    const given = { ...short, tools, max_tokens: 80, ...forced };
    const stream = client.chat.completions.stream(given);
    const first = (await stream.finalChatCompletion()).choices[0];
    const call = first.message.tool_calls[0];
    need(first.finish_reason === "tool_calls", `it ended with ${first.finish_reason}`);
    need(typeof JSON.parse(call.function.arguments).city === "string", "no city in the call");
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const more = { ...short, tools, messages: [...messages, first.message, result] };
    need((await client.chat.completions.create(more)).choices.length === 1, "no second answer");
  },
  async "chat completion with a schema"() {
    const given = { ...short, max_tokens: 60, response_format: format };
    const found = await client.chat.completions.parse(given);
    need(typeof found.choices[0].message.parsed.city === "string", "it does not fit the schema");
  },
  async "chat completion with log probabilities"() {
    const found = await client.chat.completions.create({ ...short, logprobs: true, top_logprobs: 2 });
    const content = found.choices[0].logprobs.content;
    need(content.length === 8 && content[0].top_logprobs.length === 2, "some are missing");
  },
  async "text completion"() {
    const given = { model, prompt: "def f(", max_tokens: 8, temperature: 0 };
    const whole = await client.completions.create(given);
    const chunks = await collected(await client.completions.create({ ...given, stream: true }));
    const text = chunks.map((chunk) => chunk.choices[0]?.text ?? "").join("");
    need(text === whole.choices[0].text, "the stream differs from the whole answer");
  },
  async "errors"() {
    const wrong = await refused(() => client.chat.completions.create({ ...short, top_p: 2 }), 400);
    need(wrong.param === "top_p", `the field is ${wrong.param}`);
    const long = { ...short, messages: [{ role: "user", content: "word ".repeat(200000) }] };
    const full = await refused(() => client.chat.completions.create(long), 400);
    need(full.code === "context_length_exceeded", `the code is ${full.code}`);
  },
  async "a stream that the client leaves"() {
    const given = { model, messages, stream: true, max_tokens: 4000 };
    const stream = await client.chat.completions.create(given);
    for await (const _ of stream) break;
    stream.controller.abort();
  },
  async "response"() {
    const found = await client.responses.create(asked);
    need(found.status === "incomplete" && found.usage.output_tokens === 8, "its end is wrong");
  },
  async "response as a stream"() {
    const stream = client.responses.stream({ ...asked, temperature: 0 });
    const kinds = (await collected(stream)).map((event) => event.type);
    const streamed = await stream.finalResponse();
    const whole = await client.responses.create({ ...asked, temperature: 0 });
    need(kinds[0] === "response.created", `it began with ${kinds[0]}`);
    need(streamed.output_text === whole.output_text, "it differs from the whole answer");
  },
  async "response with tools, a round trip"() {
    const forced = { tool_choice: "required", parallel_tool_calls: false };
    const given = { model, input: "Weather?", tools: responseTools, ...forced };
    const first = await client.responses.stream(given).finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    need(typeof JSON.parse(call.arguments).city === "string", "no city in the call");
    const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const linked = { ...asked, input: [output], previous_response_id: first.id, tools: responseTools };
    need((await client.responses.create(linked)).output.length >= 1, "no answer by its id");
    const input = [{ role: "user", content: "Weather?" }, ...first.output, output];
    const second = await client.responses.create({ ...asked, input, tools: responseTools });
    need(second.output.length >= 1, "no answer to the whole input");
  },
  async "response with a schema"() {
    const given = { model, input: "A city.", max_output_tokens: 60, text: responseFormat };
    const found = await client.responses.parse(given);
    need(typeof found.output_parsed.city === "string", "it does not fit the schema");
  },
  async "response that is stored and deleted"() {
    const found = await client.responses.create(asked);
    need((await client.responses.retrieve(found.id)).id === found.id, "it is not stored");
    await client.responses.delete(found.id);
    await refused(() => client.responses.retrieve(found.id), 404);
  },
  async "errors of responses"() {
    const image = { role: "user", content: [{ type: "input_image", image_url: "data:," }] };
    await refused(() => client.responses.create({ ...asked, input: [image] }), 400);
    await refused(() => client.responses.create({ ...asked, previous_response_id: "resp_0" }), 400);
  },
});
