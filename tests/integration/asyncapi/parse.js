// Parses AsyncAPI documents by the official parser, with their Avro schemas. Prints one line of JSON for each: its problems
// (errors and warnings), its operations, and the number of its schemas.
const { readFileSync } = require("fs");
const { Parser } = require("@asyncapi/parser");
const { AvroSchemaParser } = require("@asyncapi/avro-schema-parser");

async function main() {
  const parser = new Parser();
  parser.registerSchemaParser(AvroSchemaParser());
  for (const path of process.argv.slice(2)) {
    const { document, diagnostics } = await parser.parse(readFileSync(path, "utf8"));
    const serious = diagnostics.filter((one) => one.severity < 2);
    const problems = serious.map((one) => `${one.code} ${one.path.join("/")}: ${one.message}`);
    const operations = document?.operations().all().map((one) => one.id()) ?? [];
    console.log(JSON.stringify({ problems, operations, schemas: document?.allSchemas().all().length ?? 0 }));
  }
}

main();
