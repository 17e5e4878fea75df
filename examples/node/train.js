// Trains a small model for a few steps from Node, then has it continue the sequence it learned.
//   npm install && node train.js [steps]

import { connectMesh } from "./phaseloom.js";

const steps = Number(process.argv[2] ?? 8);
const model = {
  config: {
    model_type: "qwen3", vocab_size: 16, hidden_size: 64, intermediate_size: 128,
    num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
    max_position_embeddings: 64, tie_word_embeddings: true,
  },
};

// Counting upwards, modulo 16, from every start: position i predicts targets[i].
const row = (start) => Array.from({ length: 24 }, (_, i) => (start + i) % 16);
const batch = Array.from({ length: 16 }, (_, start) => ({
  tokens: row(start), targets: row(start + 1), weights: row(0).map(() => 1 / (16 * 24)),
}));

const mesh = await connectMesh();
const job = await mesh.submitJob(`node-${process.pid}`, [
  { name: "policy", pool: "train", backend: "fsdp", model, trainable: true },
  { name: "sampler", pool: "rollout", backend: "sampler", model },
]);

const losses = [];
for (let step = 1; step <= steps; step++) {
  const pass = job.submit("policy", { type: "forward_backward", batch, loss: "cross_entropy" });
  const update = job.submit("policy", { type: "optim_step", adam: { learning_rate: 0.01 } });
  losses.push((await pass.result).metrics["loss:sum"]);
  await update.result;
  await job.report(step, { loss: losses.at(-1) });
  console.log(`step ${step}: loss ${losses.at(-1).toFixed(3)}`);
}

const published = job.submit("policy", { type: "publish_weights" });
const { deployment, seq } = published;
job.submit("sampler", { type: "sync_weights", policy: deployment, version: seq }, [{ deployment, seq }])
  .result.catch(() => {}); // what comes after it fails with it, and says why
const generated = await job.submit("sampler", {
  type: "generate", prompts: [{ tokens: [3, 4, 5] }], sampling: { max_tokens: 6, temperature: 0 },
}).result;
console.log(`3 4 5 -> ${generated.sequences[0][0].tokens.join(" ")}`);

await job.finish();
await mesh.close();
if (!(losses.at(-1) < losses[0])) throw new Error(`the loss did not fall: ${losses}`);
