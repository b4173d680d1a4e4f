// Sends each file as one record, keyed by its name, with kafkajs as it comes.
// usage: node produce.js BOOTSTRAP TOPIC CODEC FILE...   CODEC "default" leaves the client's own choice.
const fs = require("node:fs");
const path = require("node:path");
const { CompressionTypes, Kafka, Partitioners, logLevel } = require("kafkajs");

async function main([bootstrap, topic, codec, ...files]) {
  const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN });
  const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner });
  await producer.connect();
  const messages = files.map((file) => ({ key: path.parse(file).name, value: fs.readFileSync(file) }));
  const compression = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP }[codec];
  await producer.send(compression === undefined ? { topic, messages } : { topic, messages, compression });
  await producer.disconnect();
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
