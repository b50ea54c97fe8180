// A user's program with the types that openapi-typescript made: a gradient, a job, a tensor, a check, and an error. `tsc` checks it, node runs it.
import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

const client = createClient<paths, "application/json" | "application/problem+json">({ baseUrl: process.argv[2] });

const attributes: components["schemas"]["ConvolutionBackwardWeightsAttributes"] = {
  strides: [1],
  pads_begin: [0],
  pads_end: [0],
  dilations: [1],
  data_format: "NCX",
  weights_format: "OIX",
};

function tensor(shape: number[], values: number[]) {
  return { dtype: "f32" as const, shape, data: Buffer.from(Float32Array.from(values).buffer).toString("base64") };
}

const inputs = { src: tensor([1, 1, 3], [1, 2, 3]), diff_dst: tensor([1, 1, 2], [1, 1]), weights_shape: [1, 1, 2] };
const { data } = await client.POST("/v1/ops/ConvolutionBackwardWeights", { body: { attributes, inputs } });
const bytes = Buffer.from(data!.outputs.diff_weights.data as string, "base64");
assert.deepEqual([bytes.readFloatLE(0), bytes.readFloatLE(4)], [3, 5]);

const header = { Prefer: "respond-async", "Idempotency-Key": "typescript" };
const submitted = await client.POST("/v1/ops/{op}/tolerance", { params: { path: { op: "ConvolutionBackwardWeights" }, header }, body: { attributes, inputs } });
assert.equal(submitted.response.status, 202);
const { job } = submitted.data as components["schemas"]["JobState"];
const path = { params: { path: { job } } };
while ((await client.GET("/v1/jobs/{job}", path)).data!.state !== "done");
assert.equal((await client.GET("/v1/jobs")).data!.jobs!.length, 1);
assert("outputs" in ((await client.GET("/v1/jobs/{job}/result", path)).data as object));
assert.equal((await client.DELETE("/v1/jobs/{job}", path)).data!.state, "done");
assert.equal((await client.GET("/v1/jobs/{job}", path)).error!.code, "not_found");

const kept = await client.POST("/v1/tensors", { body: { inputs: { tensor: inputs.src } } });
const { handle } = kept.data!;
const dropped = await client.DELETE("/v1/tensors/{handle}", { params: { path: { handle } } });
assert.equal(dropped.response.status, 200);
const key = await client.GET("/v1/checks/key");
assert.equal(Buffer.from(key.data!.public_key as string, "base64").length, 32);

const described = { src: { dtype: "f32" as const, shape: [1, 1, 3] }, diff_dst: inputs.diff_dst, weights_shape: [1, 1, 2] };
const checked = await client.POST("/v1/ops/ConvolutionBackwardWeights/validate", { body: { attributes, inputs: described } });
assert.deepEqual(checked.data!.outputs.diff_weights.shape, [1, 1, 2]);

const any = await client.POST("/v1/ops/{op}", { params: { path: { op: "BiasAdd" } }, body: { attributes: {}, inputs: {} } });
assert.equal(any.response.status, 422);
assert.equal(any.error!.code, "invalid_params");

// @ts-expect-error: the attribute is one of another operation
const wrong: components["schemas"]["BiasAddAttributes"] = { strides: [1] };
console.log("openapi-fetch:", wrong ? "called" : "");
