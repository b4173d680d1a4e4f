// Sends each file as one record, keyed by its name, with a stock Go client that is set up as little as possible.
// usage: produce kafka-go|franz-go BOOTSTRAP TOPIC CODEC FILE...   CODEC "default" leaves the client's own choice.
package main

import (
	"context"
	"log"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"
)

type file struct{ key, value []byte }

func main() {
	library, bootstrap, topic, codec := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	var files []file
	for _, path := range os.Args[5:] {
		value, err := os.ReadFile(path)
		check(err)
		name := filepath.Base(path)
		files = append(files, file{[]byte(strings.TrimSuffix(name, filepath.Ext(name))), value})
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if library == "kafka-go" {
		segmentio(ctx, bootstrap, topic, codec, files)
	} else {
		franz(ctx, bootstrap, topic, codec, files)
	}
}

func segmentio(ctx context.Context, bootstrap, topic, codec string, files []file) {
	writer := &kafka.Writer{Addr: kafka.TCP(bootstrap), Topic: topic}
	codecs := map[string]kafka.Compression{
		"gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd,
	}
	if compression, named := codecs[codec]; named {
		writer.Compression = compression
	}
	var messages []kafka.Message
	for _, one := range files {
		messages = append(messages, kafka.Message{Key: one.key, Value: one.value})
	}
	check(writer.WriteMessages(ctx, messages...))
	check(writer.Close())
}

func franz(ctx context.Context, bootstrap, topic, codec string, files []file) {
	options := []kgo.Opt{kgo.SeedBrokers(bootstrap), kgo.DefaultProduceTopic(topic)}
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	if compression, named := codecs[codec]; named {
		options = append(options, kgo.ProducerBatchCompression(compression))
	}
	client, err := kgo.NewClient(options...)
	check(err)
	defer client.Close()
	var records []*kgo.Record
	for _, one := range files {
		records = append(records, &kgo.Record{Key: one.key, Value: one.value})
	}
	check(client.ProduceSync(ctx, records...).FirstErr())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
