// The Node client, as clients/README.md describes.
'use strict';
const readline = require('node:readline');
const { ConsumeResult, Producer, PushConsumer, SimpleConsumer } = require('rocketmq-client-nodejs');

const [endpoints, topic, group, check] = process.argv.slice(2);
const RESOLUTIONS = { commit: 1, rollback: 2, unknown: 0 }; // the package does not export their names
const silent = Object.fromEntries(['error', 'warn', 'info', 'debug'].map(name => [name, () => {}]));
const show = answer => process.stdout.write(`${JSON.stringify(answer)}\n`);

const messageOf = request => ({
  topic,
  body: Buffer.from(request.body),
  tag: request.tag,
  keys: request.keys ?? [],
  properties: new Map(Object.entries(request.properties ?? {})),
  messageGroup: request.group,
  deliveryTimestamp: request.delay ? new Date(Date.now() + request.delay * 1000) : undefined,
});

const fieldsOf = message => ({
  id: message.messageId,
  body: message.body.toString(),
  keys: [...message.keys].sort(),
  tag: message.tag ?? null,
  properties: Object.fromEntries(message.properties),
  group: message.messageGroup ?? null,
  attempt: message.deliveryAttempt,
});

async function main() {
  const checker = {
    async check(message) {
      show({ check: message.messageId });
      return RESOLUTIONS[check];
    },
  };
  const producer = new Producer({ endpoints, namespace: '', topic, checker, logger: silent });
  await producer.startup();
  let consumer;
  if (group) {
    const subscriptions = new Map([[topic, '*']]);
    consumer = new SimpleConsumer({
      endpoints, namespace: '', consumerGroup: group, subscriptions, awaitDuration: 5000, logger: silent,
    });
    await consumer.startup();
  }
  let transaction;
  let received = [];
  const pushing = [];
  const push = ({ group: consumerGroup, failures }) => new PushConsumer({
    endpoints, namespace: '', consumerGroup, subscriptions: new Map([[topic, '*']]), logger: silent,
    messageListener: {
      consume(message) {
        show({ pushed: fieldsOf(message) });
        return message.deliveryAttempt <= failures ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
      },
    },
  });
  const actions = {
    send: async request => {
      const receipt = await producer.send(messageOf(request));
      return { id: receipt.messageId, handle: receipt.recallHandle };
    },
    recall: async request => ({ id: (await producer.recallMessage(topic, request.handle)).messageId }),
    push: async request => {
      pushing.push(push(request));
      await pushing.at(-1).startup();
      return { ok: true };
    },
    half: async request => {
      transaction = producer.beginTransaction();
      return { id: (await producer.send(messageOf(request), transaction)).messageId };
    },
    commit: async () => { await transaction.commit(); return { ok: true }; },
    rollback: async () => { await transaction.rollback(); return { ok: true }; },
    receive: async request => {
      received = await consumer.receive(request.max, request.invisible * 1000);
      return { messages: received.map(fieldsOf) };
    },
    ack: async () => {
      for (const message of received) await consumer.ack(message);
      return { ok: true };
    },
    stop: async () => {
      await producer.shutdown();
      await consumer?.shutdown();
      for (const one of pushing) await one.shutdown();
      return { ok: true };
    },
  };
  show({ ready: true });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    try {
      show(await actions[request.do](request));
    } catch (problem) {
      show({ error: String(problem) });
    }
    if (request.do === 'stop') process.exit(0);
  }
}

main();
