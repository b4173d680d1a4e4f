// Sends a request as JSON to a queue of `penstock bridge`, and prints its outcome, which comes as JSON too.
// usage: node json_results.js BOOTSTRAP_SERVERS QUEUE RESULTS CORRELATION_ID   Needs kafkajs.
const { randomUUID } = require("node:crypto");
const { Kafka, Partitioners, logLevel } = require("kafkajs");

async function main([bootstrap, queue, results, correlationId]) {
  const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN });
  const consumer = kafka.consumer({ groupId: `json-results-${randomUUID()}` });
  await consumer.connect();
  await consumer.subscribe({ topic: results, fromBeginning: true });
  const outcome = new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => reject(payload.error));
    const eachMessage = async ({ message }) => {
      const found = JSON.parse(message.value.toString());
      if (found.correlation_id === correlationId) resolve(found);
    };
    consumer.run({ eachMessage }).catch(reject);
  });
  const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner });
  await producer.connect();
  const payload = { messages: [{ role: "user", content: "Hello" }] };
  const value = JSON.stringify({ correlation_id: correlationId, type: "chat", payload });
  await producer.send({ topic: queue, messages: [{ value }] });
  console.log(JSON.stringify(await outcome));
  await Promise.all([producer.disconnect(), consumer.disconnect()]);
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
