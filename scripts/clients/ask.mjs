// Ask a server by the official clients for Node: ask.mjs URL [PICTURE].
import Anthropic from '@anthropic-ai/sdk'
import { readFileSync } from 'node:fs'
import { Ollama } from 'ollama'
import OpenAI from 'openai'

const [url, picture] = process.argv.slice(2)
const data = picture && readFileSync(picture).toString('base64')
const messages = [{ role: 'user', content: 'Hello' }]
const schema = { type: 'object', properties: { city: { enum: ['Rome', 'Oslo'] } }, required: ['city'] }
const tools = [{ type: 'function', function: { name: 'weather', description: 'Tells it.', parameters: schema } }]
const about = (part) => [{ role: 'user', content: [{ type: 'text', text: 'What is this?' }, part] }]

function told(what, value) {
  console.log(`${what}: ${JSON.stringify(value)?.slice(0, 80)}`)
  if (!value) throw new Error(what)
  return value
}

async function all(stream) {
  const found = []
  for await (const one of stream) found.push(one)
  return found
}

async function askOllama() {
  const client = new Ollama({ host: url })
  const model = told('list', (await client.list()).models[0].model)
  const few = { model, messages, options: { num_predict: 8 } }
  told('show', (await client.show({ model })).capabilities)
  told('chat', (await client.chat(few)).eval_count)
  told('stream', (await all(await client.chat({ ...few, stream: true }))).at(-1).done)
  told('generate', (await client.generate({ model, prompt: 'Hi', options: few.options })).eval_count)
  told('tools', (await client.chat({ ...few, tools })).done)
  if (data) {
    const seen = [{ ...messages[0], images: [data] }]
    told('picture', (await client.chat({ ...few, messages: seen })).prompt_eval_count)
  }
}

async function askOpenAI() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'any' })
  const model = told('list', (await client.models.list()).data[0].id)
  const few = { model, messages, max_tokens: 8 }
  const chat = (body) => client.chat.completions.create({ ...few, ...body })
  told('chat', (await chat({})).usage.completion_tokens)
  told('stream', (await all(await chat({ stream: true }))).length)
  const called = await chat({ max_tokens: 400, tools, tool_choice: 'required' })
  told('tools', called.choices[0].message.tool_calls)
  const asked = { model, input: 'Hi', max_output_tokens: 16 }
  told('responses', (await client.responses.create(asked)).status)
  told('events', (await all(await client.responses.create({ ...asked, stream: true }))).at(-1).type)
  if (data) {
    const image = { type: 'image_url', image_url: { url: `data:image/png;base64,${data}` } }
    told('picture', (await chat({ messages: about(image) })).usage.prompt_tokens)
  }
}

async function askAnthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: 'any' })
  const few = { model: 'any', messages, max_tokens: 8 }
  told('list', (await client.models.list()).data[0].id)
  told('chat', (await client.messages.create(few)).usage.output_tokens)
  told('stream', (await client.messages.stream(few).finalMessage()).stop_reason)
  const call = { tools: [{ name: 'weather', input_schema: schema }], tool_choice: { type: 'any' } }
  told('tools', (await client.messages.create({ ...few, ...call, max_tokens: 400 })).content)
  if (data) {
    const image = { type: 'image', source: { type: 'base64', media_type: 'image/png', data } }
    told('picture', (await client.messages.create({ ...few, messages: about(image) })).usage.input_tokens)
  }
}

for (const [name, ask] of [['ollama', askOllama], ['openai', askOpenAI], ['anthropic', askAnthropic]]) {
  console.log(`-- ${name} for Node`)
  await ask()
}
