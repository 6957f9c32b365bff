// What the checks of both clients share: run each by name, tell which failed, and end with a status.

export const ADDRESS = process.argv[2];
export const KEY = process.argv[3];
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Lima"] } },
  required: ["city"],
  additionalProperties: false,
};

export function need(condition, message) {
  if (!condition) throw new Error(message);
}

export async function refused(work, status) {
  try {
    await work();
  } catch (error) {
    need(error.status === status, `status ${error.status} in place of ${status}: ${error.message}`);
    return error;
  }
  throw new Error("it was not refused");
}

export async function run(name, checks) {
  let failed = 0;
  for (const [what, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`ok    ${name}: ${what}`);
    } catch (error) {
      failed += 1;
      console.log(`FAIL  ${name}: ${what}: ${error.message}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
